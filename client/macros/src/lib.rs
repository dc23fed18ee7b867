//! The attribute macros of Wingbeat. Use them through the `wingbeat` crate, where they are documented.

mod actor;
mod attributes;
mod crate_path;
mod function;
mod instances;
mod plain;
mod remote;

use proc_macro::TokenStream;
use quote::quote;
use syn::parse_macro_input;

/// Makes a function callable on other processes; see `wingbeat::remote`.
#[proc_macro_attribute]
pub fn remote(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let item = parse_macro_input!(item as syn::ItemFn);
    remote::expand(attribute.into(), &item).unwrap_or_else(|error| with_item(&error, &item)).into()
}

/// Makes a type an actor; see `wingbeat::actor`.
#[proc_macro_attribute]
pub fn actor(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let item = parse_macro_input!(item as syn::ItemImpl);
    actor::expand(attribute.into(), &item)
        .unwrap_or_else(|error| with_item(&error, &actor::without_method_attributes(&item)))
        .into()
}

/// Makes a struct of numbers an element of buffers; see `wingbeat::Plain`.
#[proc_macro_derive(Plain, attributes(plain))]
pub fn plain(item: TokenStream) -> TokenStream {
    let item = parse_macro_input!(item as syn::DeriveInput);
    plain::expand(&item).unwrap_or_else(|error| error.to_compile_error()).into()
}

/// Runs an async `main` and leaves the cluster at its end; see `wingbeat::main`.
#[proc_macro_attribute]
pub fn main(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let mut item = parse_macro_input!(item as syn::ItemFn);
    let (path, error) = match crate_path::of_main(attribute.into()) {
        Ok(path) => (path, None),
        Err(error) => (None, Some(error.to_compile_error())),
    };
    if item.sig.asyncness.take().is_none() {
        let message = "#[wingbeat::main] is for an `async fn main`; a plain one can call wingbeat::init_blocking()";
        return syn::Error::new_spanned(&item.sig, message).to_compile_error().into();
    }
    let body = &item.block;
    let output: syn::Type = match &item.sig.output {
        syn::ReturnType::Default => syn::parse_quote!(()),
        syn::ReturnType::Type(_, output) => (**output).clone(),
    };
    let (attributes, visibility, mut signature) = (&item.attrs, &item.vis, item.sig.clone());
    signature.output = syn::parse_quote!(-> ::std::process::ExitCode);
    let before = quote! {
        #[allow(unused_imports)]
        use ::wingbeat::__private::{EndOfMain as _, ErrorOfMain as _};
    };
    let (run, end) = (quote!(::wingbeat::__private::run_main), quote!(::wingbeat::__private::Main));
    let [before, run, end] = [before, run, end].map(|code| crate_path::renamed(code, path.as_ref()));
    quote! {
        #(#attributes)* #visibility #signature {
            #before
            let output: #output = #run(async #body);
            (&mut #end(::std::option::Option::Some(output))).exit()
        }
        #error
    }
    .into()
}

/// The error and the item as it was, so that the rest of the program does not complain about its absence.
fn with_item(error: &syn::Error, item: &impl quote::ToTokens) -> proc_macro2::TokenStream {
    let error = error.to_compile_error();
    quote! { #item #error }
}
