//! `#[derive(Plain)]`: a struct whose fields are plain, without gaps between them.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Data, DeriveInput, Meta, Path, Token, punctuated::Punctuated};

use crate::crate_path;

pub(crate) fn expand(item: &DeriveInput) -> syn::Result<TokenStream> {
    let Data::Struct(data) = &item.data else {
        let why = "only a struct can be plain: not every number is a variant of an enum or says what a union holds";
        return Err(syn::Error::new_spanned(&item.ident, why));
    };
    if !item.generics.params.is_empty() {
        let why = "a struct with parameters cannot be plain, since its layout is not known here; write its types out";
        return Err(syn::Error::new_spanned(&item.generics, why));
    }
    if !has_layout(item)? {
        let why = "add #[repr(C)]: without it the compiler may order the fields as it likes, in each program";
        return Err(syn::Error::new_spanned(&item.ident, why));
    }
    if data.fields.is_empty() {
        return Err(syn::Error::new_spanned(&item.ident, "a struct without fields has no bytes that could be sent"));
    }
    let path = crate_of(item)?;
    let name = &item.ident;
    let sizes = data.fields.iter().map(|field| {
        let ty = &field.ty;
        quote_spanned!(ty.span()=> size_of_plain::<#ty>())
    });
    let padding = format!(
        "`{name}` has padding, bytes that belong to no field: order its fields from large to small, and fill what is left \
         with a field such as `unused: [u8; 4]`"
    );
    let empty = format!("`{name}` has no bytes that could be sent");
    let check = quote_spanned! {name.span()=>
        ::core::assert!(::core::mem::size_of::<#name>() > 0, #empty);
        ::core::assert!(::core::mem::size_of::<#name>() == ::wingbeat::__private::sum(&[#(#sizes),*]), #padding);
    };
    let plain = quote! {
        const _: () = {
            const fn size_of_plain<T: ::wingbeat::Plain>() -> usize {
                ::core::mem::size_of::<T>()
            }
            #check
        };

        // SAFETY: the layout is fixed, each field is plain, and between them there is nothing.
        unsafe impl ::wingbeat::Plain for #name {}
    };
    Ok(crate_path::renamed(plain, path.as_ref()))
}

/// The path in `#[plain(crate = "path")]`.
fn crate_of(item: &DeriveInput) -> syn::Result<Option<Path>> {
    let mut path = None;
    for attribute in item.attrs.iter().filter(|attribute| attribute.path().is_ident("plain")) {
        for option in attribute.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)? {
            if !option.path().is_ident(crate_path::OPTION) {
                return Err(syn::Error::new_spanned(&option, "#[plain] takes no options but `crate`"));
            }
            path = Some(crate_path::read(&option)?);
        }
    }
    Ok(path)
}

/// Whether the struct says in which order its fields lie.
fn has_layout(item: &DeriveInput) -> syn::Result<bool> {
    for attribute in item.attrs.iter().filter(|attribute| attribute.path().is_ident("repr")) {
        let options = attribute.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)?;
        if options.iter().any(|option| option.path().is_ident("C") || option.path().is_ident("transparent")) {
            return Ok(true);
        }
    }
    Ok(false)
}
