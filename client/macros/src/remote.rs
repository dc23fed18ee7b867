//! `#[remote]`: the function stays as it is, and a struct of the same name in the type namespace has `remote`.

use proc_macro2::TokenStream;
use quote::quote;
use syn::ItemFn;

use crate::attributes::{Attributes, Place};
use crate::crate_path;
use crate::function::{self, Parameter};
use crate::instances::{self, Parameters};

pub(crate) fn expand(attribute: TokenStream, item: &ItemFn) -> syn::Result<TokenStream> {
    let attributes = Attributes::parse(Place::Function, attribute)?;
    let signature = &item.sig;
    function::check(signature)?;
    if let Some(receiver) = signature.receiver() {
        return Err(syn::Error::new_spanned(
            receiver,
            "#[remote] is for functions; for a type with state use #[wingbeat::actor]",
        ));
    }
    let parameters = function::parameters(signature)?;
    let returns = function::returns(&signature.output, attributes.num_returns.as_ref())?;
    attributes.check_errors(&returns)?;
    let (name, visibility) = (&signature.ident, &item.vis);
    let names: Vec<_> = parameters.iter().map(|parameter| &parameter.name).collect();
    let types: Vec<_> = parameters.iter().map(|parameter| &parameter.ty).collect();
    let texts: Vec<String> = names.iter().map(ToString::to_string).collect();
    let (marker, refs, outputs) = (returns.marker(), returns.refs(), returns.outputs());
    let (decode, text, defaults) = (function::decode(&parameters), function::text(signature), attributes.defaults());
    let is_asynchronous = signature.asyncness.is_some();
    let name_text = name.to_string();
    let arguments = function::arguments();
    let run = body(item, &parameters, &returns);
    let docs = item.attrs.iter().filter(|attribute| attribute.path().is_ident("doc"));
    let remote_doc = format!("Runs [`{name_text}`] on another process of the cluster; the result arrives in the ref.");
    let Parameters { declared, given, field } = Parameters::of(&signature.generics);
    let instances = instances::of(name, &signature.generics, attributes.instances.as_ref())?;
    let entries = instances.iter().map(|instance| {
        let (definitions, of) = (&instance.definitions, &instance.text);
        let text = format!("{text}{of}");
        quote! {
            #[allow(non_camel_case_types, clippy::too_many_arguments)]
            const _: () = {
                #definitions

                const PATH: &str = ::core::concat!(::core::module_path!(), "::", #name_text, #of);

                fn __wingbeat_run(mut #arguments: ::wingbeat::__private::Arguments)
                    -> ::core::result::Result<::wingbeat::__private::Running, ::wingbeat::Error>
                {
                    #decode
                    ::core::result::Result::Ok(#run)
                }

                static ENTRY: ::wingbeat::__private::Function = ::wingbeat::__private::Function {
                    path: PATH,
                    signature: #text,
                    parameters: &[#(#texts),*],
                    outputs: #outputs,
                    is_asynchronous: #is_asynchronous,
                    defaults: #defaults,
                    run: __wingbeat_run,
                    checked: ::core::sync::atomic::AtomicU32::new(0),
                };

                ::wingbeat::__private::inventory::submit! {
                    ::wingbeat::__private::Entry::Function(&ENTRY)
                }

                #[allow(dead_code)]
                impl #name #given {
                    #[doc = #remote_doc]
                    #visibility fn remote(#(#names: impl ::wingbeat::IntoArg<#types>),*) -> #refs {
                        Self::options().remote(#(#names),*)
                    }

                    /// Options for one call; `.remote(…)` makes it.
                    #visibility fn options() -> ::wingbeat::TaskOptions<fn(#(#types),*) -> #marker> {
                        ::wingbeat::TaskOptions::of(&ENTRY)
                    }
                }
            };
        }
    });
    let code = quote! {
        #(#docs)*
        #[allow(non_camel_case_types, dead_code)]
        #visibility struct #name #declared { #field }

        #(#entries)*
    };
    let code = crate_path::renamed(code, attributes.crate_path.as_ref());
    Ok(quote!(#item #code))
}

fn body(item: &ItemFn, parameters: &[Parameter], returns: &function::Returns) -> TokenStream {
    let name = &item.sig.ident;
    let locals = parameters.iter().map(|parameter| &parameter.local);
    let given = Parameters::of(&item.sig.generics).given;
    let instance = if given.is_empty() { given } else { quote!(::#given) };
    let call = quote!(#name #instance (#(#locals),*));
    // Not to be met by the function's own name.
    let items = proc_macro2::Ident::new("items", proc_macro2::Span::mixed_site());
    let is_async = item.sig.asyncness.is_some();
    if returns.is_items() {
        let finish = returns.finish_item(&quote!(item));
        return match (returns.is_async_stream(), is_async) {
            (false, false) => quote! {
                ::wingbeat::__private::Running::Items(::std::boxed::Box::new(
                    ::core::iter::Iterator::map(#call, |item| #finish)
                ))
            },
            (true, false) => quote! {
                ::wingbeat::__private::Running::Stream(::std::boxed::Box::pin(
                    ::wingbeat::__private::StreamExt::map(#call, |item| #finish)
                ))
            },
            (true, true) => quote! {
                ::wingbeat::__private::Running::Stream(::wingbeat::__private::yielding(move |mut #items| async move {
                    let mut source = ::std::pin::pin!(#call.await);
                    while let ::core::option::Option::Some(item) = ::wingbeat::__private::StreamExt::next(&mut source).await {
                        #items.send(#finish).await;
                    }
                }))
            },
            (false, true) => quote! {
                ::wingbeat::__private::Running::Stream(::wingbeat::__private::yielding(move |mut #items| async move {
                    for item in #call.await {
                        #items.send(#finish).await;
                    }
                }))
            },
        };
    }
    if is_async {
        let finish = returns.finish(&quote!(#call.await));
        return quote!(::wingbeat::__private::Running::Future(::std::boxed::Box::pin(async move { #finish })));
    }
    let finish = returns.finish(&call);
    quote!(::wingbeat::__private::Running::Done(#finish))
}
