//! `instances(f32, f64)`: those instances of a generic function that other processes can be asked to run.

use proc_macro2::TokenStream;
use quote::{ToTokens, quote};
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{GenericArgument, GenericParam, Generics, Ident, MetaList, Token, Type, parenthesized};

/// One instance: for which types and constants its parameters stand.
#[derive(Default)]
pub(crate) struct Instance {
    /// `type T = f32;` for each parameter: what is written of the function means this instance where these are in scope.
    pub definitions: TokenStream,
    /// `::<f32>` for people; empty of a function that is not generic.
    pub text: String,
}

/// How a struct is written that has a function's parameters.
pub(crate) struct Parameters {
    /// `<T, const N: usize>`.
    pub declared: TokenStream,
    /// `<T, { N }>`.
    pub given: TokenStream,
    /// A field in which each type occurs.
    pub field: TokenStream,
}

/// The parameters of a function but for lifetimes.
fn named(generics: &Generics) -> Vec<&GenericParam> {
    generics.params.iter().filter(|parameter| !matches!(parameter, GenericParam::Lifetime(_))).collect()
}

impl Parameters {
    pub(crate) fn of(generics: &Generics) -> Parameters {
        let named = named(generics);
        if named.is_empty() {
            return Parameters { declared: quote!(), given: quote!(), field: quote!() };
        }
        let declared = named.iter().map(|parameter| match parameter {
            GenericParam::Const(constant) => {
                let (name, ty) = (&constant.ident, &constant.ty);
                quote!(const #name: #ty)
            }
            parameter => name_of(parameter).into_token_stream(),
        });
        let given = named.iter().map(|parameter| match parameter {
            GenericParam::Const(constant) => {
                let name = &constant.ident;
                quote!({ #name })
            }
            parameter => name_of(parameter).into_token_stream(),
        });
        let types: Vec<&Ident> = generics.type_params().map(|parameter| &parameter.ident).collect();
        Parameters {
            declared: quote!(<#(#declared),*>),
            given: quote!(<#(#given),*>),
            field: quote!(instance: ::core::marker::PhantomData<(#(fn() -> #types,)*)>),
        }
    }
}

fn name_of(parameter: &GenericParam) -> Option<&Ident> {
    match parameter {
        GenericParam::Type(parameter) => Some(&parameter.ident),
        GenericParam::Const(parameter) => Some(&parameter.ident),
        GenericParam::Lifetime(_) => None,
    }
}

/// What stands for one parameter, or in parentheses for several.
struct Named<const MANY: bool>(Vec<GenericArgument>);

impl<const MANY: bool> Parse for Named<MANY> {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        if !MANY {
            return Ok(Named(vec![input.parse()?]));
        }
        if !input.peek(syn::token::Paren) {
            return Err(input.error(
                "several parameters: an instance is in parentheses, as in `instances((f32, u64), (f64, u64))`",
            ));
        }
        let inside;
        parenthesized!(inside in input);
        Ok(Named(Punctuated::<GenericArgument, Token![,]>::parse_terminated(&inside)?.into_iter().collect()))
    }
}

/// The instances that are `asked` for of a function with these parameters; the one that there is of a function without.
pub(crate) fn of(name: &Ident, generics: &Generics, asked: Option<&MetaList>) -> syn::Result<Vec<Instance>> {
    let parameters = named(generics);
    let Some(asked) = asked else {
        return match parameters.as_slice() {
            [] => Ok(vec![Instance::default()]),
            _ => Err(syn::Error::new_spanned(
                generics,
                format!(
                    "another process must know which instances of `{name}` to have: name them, as in \
                     `#[wingbeat::remote(instances(f32, f64))]`, and call `{name}::<f32>::remote(…)`"
                ),
            )),
        };
    };
    let instances: Vec<Vec<GenericArgument>> = match parameters.len() {
        0 => {
            return Err(syn::Error::new_spanned(
                asked,
                format!("`{name}` has no parameters in `<…>` to name instances of"),
            ));
        }
        1 => asked
            .parse_args_with(Punctuated::<Named<false>, Token![,]>::parse_terminated)?
            .into_iter()
            .map(|named| named.0)
            .collect(),
        _ => asked
            .parse_args_with(Punctuated::<Named<true>, Token![,]>::parse_terminated)?
            .into_iter()
            .map(|named| named.0)
            .collect(),
    };
    if instances.is_empty() {
        return Err(syn::Error::new_spanned(asked, "name at least one instance, as in `instances(f32, f64)`"));
    }
    instances.into_iter().map(|arguments| Instance::new(&parameters, &arguments)).collect()
}

impl Instance {
    fn new(parameters: &[&GenericParam], arguments: &[GenericArgument]) -> syn::Result<Instance> {
        let all = quote!(#(#arguments),*);
        if parameters.len() != arguments.len() {
            let why = format!("{} given, where the function has {} parameters", arguments.len(), parameters.len());
            return Err(syn::Error::new_spanned(all, why));
        }
        let definitions = parameters.iter().zip(arguments).map(|(parameter, argument)| definition(parameter, argument));
        let definitions = definitions.collect::<syn::Result<TokenStream>>()?;
        // White space between words stays.
        let words: Vec<String> = all.to_string().split_whitespace().map(str::to_owned).collect();
        let is_word = |letter: Option<char>| letter.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
        let text = words.iter().fold(String::new(), |text, word| {
            let gap = is_word(text.chars().last()) && is_word(word.chars().next()) || text.ends_with(',');
            format!("{text}{}{word}", if gap { " " } else { "" })
        });
        Ok(Instance { definitions, text: format!("::<{text}>") })
    }
}

fn definition(parameter: &GenericParam, argument: &GenericArgument) -> syn::Result<TokenStream> {
    let name = name_of(parameter);
    match (parameter, argument) {
        (GenericParam::Type(_), GenericArgument::Type(ty)) => match ty {
            Type::Infer(_) => Err(syn::Error::new_spanned(ty, "name the type")),
            ty => Ok(quote!(#[allow(dead_code)] type #name = #ty;)),
        },
        (GenericParam::Const(constant), GenericArgument::Const(value)) => {
            let ty = &constant.ty;
            Ok(quote!(#[allow(dead_code, non_upper_case_globals)] const #name: #ty = #value;))
        }
        // The name of a constant looks like a type.
        (GenericParam::Const(constant), GenericArgument::Type(Type::Path(value))) => {
            let ty = &constant.ty;
            Ok(quote!(#[allow(dead_code, non_upper_case_globals)] const #name: #ty = #value;))
        }
        (GenericParam::Const(_), _) => Err(syn::Error::new_spanned(argument, "a constant is wanted here")),
        _ => Err(syn::Error::new_spanned(argument, "a type is wanted here")),
    }
}
