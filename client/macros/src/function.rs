//! What functions, constructors and methods have in common: parameters, what they return, how they are called.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{FnArg, GenericArgument, Meta, PathArguments, ReturnType, Signature, Type, TypeParamBound};

/// A parameter: its name for people and its type.
pub(crate) struct Parameter {
    pub name: Ident,
    /// Its name in the code that decodes it and passes it on: it meets no other.
    pub local: Ident,
    pub ty: Type,
}

/// As how many objects a tuple is returned.
#[derive(Clone)]
pub(crate) struct NumReturns {
    pub count: usize,
    /// Where that is said.
    pub says: Meta,
}

/// What a function returns, as far as can be seen from how it is written.
pub(crate) enum Returns {
    One(Type),
    /// The parts of a tuple, an object each (`num_returns`).
    Many(Vec<Type>),
    /// Items of an iterator (`false`) or of an asynchronous stream (`true`).
    Items(Box<Returns>, bool),
    /// One of the above, or an error. Where only another name of the `Result` is written, that stands for the type of the error.
    Fallible(Box<Returns>, Type),
}

/// Where `ty` is written, for code of ours that a bound on it can make fail.
fn at(ty: &Type) -> Span {
    ty.span().resolved_at(Span::mixed_site())
}

/// The parameters of a signature, without the receiver.
pub(crate) fn parameters(signature: &Signature) -> syn::Result<Vec<Parameter>> {
    let mut parameters = Vec::new();
    for input in &signature.inputs {
        let FnArg::Typed(input) = input else { continue };
        let name = match &*input.pat {
            syn::Pat::Ident(name) => name.ident.clone(),
            // A pattern has no name of its own.
            _ => format_ident!("arg{}", parameters.len(), span = Span::call_site()),
        };
        match bare(&input.ty) {
            Type::Reference(_) => {
                return Err(syn::Error::new_spanned(
                    &input.ty,
                    "a remote function cannot borrow its arguments, they come from another process; take an owned type, \
                     or an ObjectRef whose value you get() yourself",
                ));
            }
            Type::ImplTrait(_) => {
                return Err(syn::Error::new_spanned(
                    &input.ty,
                    "name the type: the worker process must know what to decode",
                ));
            }
            _ => {}
        }
        let local = format_ident!("argument{}", parameters.len(), span = Span::mixed_site());
        parameters.push(Parameter { name, local, ty: (*input.ty).clone() });
    }
    if parameters.len() > 12 {
        return Err(syn::Error::new_spanned(&signature.inputs, "at most 12 arguments; put more into a struct"));
    }
    Ok(parameters)
}

/// Refuses a method or constructor that is generic.
pub(crate) fn check_concrete(signature: &Signature) -> syn::Result<()> {
    let generics = &signature.generics;
    if generics.type_params().next().is_none() && generics.const_params().next().is_none() {
        return Ok(());
    }
    let name = &signature.ident;
    Err(syn::Error::new_spanned(
        generics,
        format!(
            "a method cannot be generic: another process must know which instance to run. Wrap the instances that you need, for \
             example: fn {name}_u64(&self, x: u64) -> u64 {{ self.{name}(x) }}"
        ),
    ))
}

/// Refuses what cannot be called from another process.
pub(crate) fn check(signature: &Signature) -> syn::Result<()> {
    let generics = &signature.generics;
    if signature.receiver().is_none() && generics.lifetimes().next().is_some() {
        let message = "a remote function cannot borrow, its arguments come from another process; take owned types";
        return Err(syn::Error::new_spanned(generics, message));
    }
    if let Some(token) = &signature.unsafety {
        return Err(syn::Error::new_spanned(token, "a remote function must be safe to call"));
    }
    if let Some(abi) = &signature.abi {
        return Err(syn::Error::new_spanned(abi, "a remote function has Rust's own calling convention"));
    }
    if let Some(variadic) = &signature.variadic {
        return Err(syn::Error::new_spanned(variadic, "a remote function has a fixed number of arguments"));
    }
    Ok(())
}

/// What a signature returns. With `num_returns`, the tuple in it is so many objects.
pub(crate) fn returns(output: &ReturnType, num_returns: Option<&NumReturns>) -> syn::Result<Returns> {
    let returns = match output {
        ReturnType::Default => Returns::One(syn::parse_quote!(())),
        ReturnType::Type(_, ty) => of_type(ty)?,
    };
    match num_returns {
        Some(asked) => returns.taken_apart(asked),
        None => Ok(returns),
    }
}

/// Whether a returned `impl Trait` says that it borrows nothing: `+ use<>`.
pub(crate) fn captures_nothing(output: &ReturnType) -> bool {
    let ReturnType::Type(_, ty) = output else { return false };
    let Type::ImplTrait(impls) = bare(ty) else { return false };
    impls
        .bounds
        .iter()
        .any(|bound| matches!(bound, TypeParamBound::PreciseCapture(capture) if capture.params.is_empty()))
}

/// The type without parentheses, and without the invisible ones that a `macro_rules` puts around its `$x:ty`.
fn bare(ty: &Type) -> &Type {
    match ty {
        Type::Group(group) => bare(&group.elem),
        Type::Paren(paren) => bare(&paren.elem),
        _ => ty,
    }
}

fn of_type(ty: &Type) -> syn::Result<Returns> {
    let ty = bare(ty);
    match ty {
        Type::Reference(_) => {
            Err(syn::Error::new_spanned(ty, "a remote function cannot return a borrow; return an owned value"))
        }
        Type::ImplTrait(impls) => {
            for bound in &impls.bounds {
                if let TypeParamBound::Trait(bound) = bound
                    && let Some(segment) = bound.path.segments.last()
                    && (segment.ident == "Iterator" || segment.ident == "Stream")
                {
                    let item = item_of(&segment.arguments)
                        .ok_or_else(|| syn::Error::new_spanned(bound, "say what the items are: Item = …"))?;
                    return Ok(Returns::Items(Box::new(of_type(&item)?), segment.ident == "Stream"));
                }
            }
            Err(syn::Error::new_spanned(ty, "of `impl Trait`, only Iterator and Stream can be returned; name the type"))
        }
        Type::Path(path) => match path.path.segments.last() {
            Some(segment) if segment.ident == "Result" => {
                let types = type_arguments(&segment.arguments);
                match types.as_slice() {
                    [ok, error] => Ok(Returns::Fallible(Box::new(of_type(ok)?), error.clone())),
                    // Another name of a `Result` with its error, as `wingbeat::Result` is: the compiler knows which.
                    [ok] if !has_no_serde_error(&path.path) => {
                        Ok(Returns::Fallible(Box::new(of_type(ok)?), ty.clone()))
                    }
                    _ => Err(syn::Error::new_spanned(
                        ty,
                        "write Result<T, E> with a serde type for E, as which the caller gets the error back; or wingbeat::Result<T>; or \
                         anyhow::Result<T>, of which the caller gets the text. io::Error and fmt::Error are no serde types",
                    )),
                }
            }
            _ => Ok(Returns::One(ty.clone())),
        },
        _ => Ok(Returns::One(ty.clone())),
    }
}

/// Whether it is one of the names of `Result` that programs often use, and whose errors cannot be sent.
fn has_no_serde_error(path: &syn::Path) -> bool {
    let module = path.segments.iter().rev().nth(1);
    module.is_some_and(|module| ["io", "fmt"].iter().any(|name| module.ident == name))
}

fn type_arguments(arguments: &PathArguments) -> Vec<Type> {
    let PathArguments::AngleBracketed(arguments) = arguments else { return Vec::new() };
    let types = arguments.args.iter().filter_map(|argument| match argument {
        GenericArgument::Type(ty) => Some(ty.clone()),
        _ => None,
    });
    types.collect()
}

fn item_of(arguments: &PathArguments) -> Option<Type> {
    let PathArguments::AngleBracketed(arguments) = arguments else { return None };
    arguments.args.iter().find_map(|argument| match argument {
        GenericArgument::AssocType(item) if item.ident == "Item" => Some(item.ty.clone()),
        _ => None,
    })
}

impl Returns {
    /// As so many objects.
    fn taken_apart(self, asked: &NumReturns) -> syn::Result<Returns> {
        let NumReturns { count, says } = asked;
        let refuse = |why: String| Err(syn::Error::new_spanned(says, format!("`num_returns = {count}`, and {why}")));
        match self {
            Returns::One(ty) => match bare(&ty) {
                Type::Tuple(tuple) if tuple.elems.len() == *count => {
                    Ok(Returns::Many(tuple.elems.iter().cloned().collect()))
                }
                Type::Tuple(tuple) => refuse(format!("the tuple that is returned has {} parts", tuple.elems.len())),
                _ => refuse("no tuple is returned that is written as one".to_owned()),
            },
            Returns::Fallible(inner, error) => Ok(Returns::Fallible(Box::new(inner.taken_apart(asked)?), error)),
            Returns::Items(..) => refuse("a stream is returned, each item of which is one object".to_owned()),
            Returns::Many(_) => Ok(self),
        }
    }

    /// The marker type that says what a call gives.
    pub(crate) fn marker(&self) -> TokenStream {
        match self {
            Returns::One(ty) => quote!(::wingbeat::__private::One<#ty>),
            Returns::Many(types) => quote!(::wingbeat::__private::Many<(#(#types,)*)>),
            Returns::Fallible(inner, _) => inner.marker(),
            Returns::Items(item, _) => {
                let ty = item.value_type();
                quote!(::wingbeat::__private::Items<#ty>)
            }
        }
    }

    fn value_type(&self) -> TokenStream {
        match self {
            Returns::One(ty) => quote!(#ty),
            Returns::Many(types) => quote!((#(#types,)*)),
            Returns::Fallible(inner, _) | Returns::Items(inner, _) => inner.value_type(),
        }
    }

    /// What a call gives, written out for the signature that users see.
    pub(crate) fn refs(&self) -> TokenStream {
        match self {
            Returns::One(ty) => quote!(::wingbeat::ObjectRef<#ty>),
            Returns::Many(types) => quote!((#(::wingbeat::ObjectRef<#types>,)*)),
            Returns::Fallible(inner, _) => inner.refs(),
            Returns::Items(item, _) => {
                let ty = item.value_type();
                quote!(::wingbeat::ObjectStream<#ty>)
            }
        }
    }

    /// `Option<u32>`: the number of objects, none for a stream.
    pub(crate) fn outputs(&self) -> TokenStream {
        match self {
            Returns::One(_) => quote!(::core::option::Option::Some(1)),
            Returns::Many(types) => {
                let count = types.len() as u32;
                quote!(::core::option::Option::Some(#count))
            }
            Returns::Fallible(inner, _) => inner.outputs(),
            Returns::Items(..) => quote!(::core::option::Option::None),
        }
    }

    pub(crate) fn is_items(&self) -> bool {
        matches!(self, Returns::Items(..))
    }

    /// Turns the returned value `value` into `Finished`.
    pub(crate) fn finish(&self, value: &TokenStream) -> TokenStream {
        match self {
            Returns::One(ty) => {
                let one = quote_spanned!(at(ty)=> ::wingbeat::__private::one);
                quote!(::core::result::Result::Ok(#one(#value)))
            }
            Returns::Items(..) => quote!(::core::result::Result::Ok(::wingbeat::__private::one(#value))),
            Returns::Many(types) => {
                let names: Vec<Ident> = (0..types.len()).map(|i| format_ident!("output{i}")).collect();
                quote!({
                    let (#(#names,)*) = #value;
                    ::core::result::Result::Ok(::wingbeat::__private::many([#(::wingbeat::__private::outgoing(#names)),*]))
                })
            }
            Returns::Fallible(inner, error) => {
                let finish = inner.finish(&quote!(value));
                let failed = failed(error);
                // By another name of a `Result` it may be of a type that is not written.
                let check = match &**inner {
                    Returns::One(_) | Returns::Many(_) => {
                        let ty = inner.value_type();
                        quote!(let value: #ty = value;)
                    }
                    Returns::Items(..) | Returns::Fallible(..) => quote!(),
                };
                quote!(match #value {
                    ::core::result::Result::Ok(value) => {
                        #check
                        #finish
                    }
                    ::core::result::Result::Err(error) => #failed,
                })
            }
        }
    }

    /// Turns an item of a stream into the registry's `Item`.
    pub(crate) fn finish_item(&self, item: &TokenStream) -> TokenStream {
        match self {
            Returns::Items(inner, _) => match &**inner {
                Returns::Fallible(ok, error) => {
                    let (outgoing, failed, ty) = (ok.outgoing(), failed(error), ok.value_type());
                    quote!(match #item {
                        ::core::result::Result::Ok(item) => {
                            let item: #ty = item;
                            ::core::result::Result::Ok(#outgoing(item))
                        }
                        ::core::result::Result::Err(error) => #failed,
                    })
                }
                inner => {
                    let outgoing = inner.outgoing();
                    quote!(::core::result::Result::Ok(#outgoing(#item)))
                }
            },
            _ => quote!(::core::result::Result::Ok(::wingbeat::__private::outgoing(#item))),
        }
    }

    fn outgoing(&self) -> TokenStream {
        match self {
            Returns::One(ty) => quote_spanned!(at(ty)=> ::wingbeat::__private::outgoing),
            _ => quote!(::wingbeat::__private::outgoing),
        }
    }

    pub(crate) fn is_async_stream(&self) -> bool {
        matches!(self, Returns::Items(_, true))
    }
}

/// What the function's own `error` becomes, which is of this type, or of one that is another name of its `Result`.
pub(crate) fn failed(ty: &Type) -> TokenStream {
    let converted = quote_spanned!(at(ty)=> converted);
    quote!({
        use ::wingbeat::__private::{SentAsText as _, SentAsValue as _};
        ::core::result::Result::Err((&::wingbeat::__private::Failure(&error)).conversion().#converted(PATH, &error))
    })
}

/// The name of the encoded arguments in the code that decodes them.
pub(crate) fn arguments() -> Ident {
    Ident::new("arguments", Span::mixed_site())
}

/// `let argument0: u64 = arguments.next("x")?;` for every parameter.
pub(crate) fn decode(parameters: &[Parameter]) -> TokenStream {
    let arguments = arguments();
    let lines = parameters.iter().map(|Parameter { name, local, ty }| {
        let text = name.to_string();
        quote_spanned!(at(ty)=> let #local: #ty = #arguments.next(#text)?;)
    });
    quote!(#(#lines)* let _ = &mut #arguments;)
}

/// A signature as text, without white space that does not matter.
pub(crate) fn text(signature: &Signature) -> String {
    let (inputs, output) = (&signature.inputs, &signature.output);
    let text = quote!(fn(#inputs) #output).to_string();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
