//! `crate = "…"`: what the crate `wingbeat` is called where no dependency has its name.

use proc_macro2::{Group, Ident, Spacing, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::{Expr, ExprLit, Lit, Meta, Path, Token};

/// The option's name.
pub(crate) const OPTION: &str = "crate";

/// The path in `crate = "path"`.
pub(crate) fn read(meta: &Meta) -> syn::Result<Path> {
    if let Meta::NameValue(pair) = meta
        && let Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) = &pair.value
    {
        return text.parse_with(Path::parse_mod_style);
    }
    Err(syn::Error::new_spanned(meta, "write the path as text, as in `crate = \"crate::reexported::wingbeat\"`"))
}

/// The options of `#[main]`, which has only this.
pub(crate) fn of_main(attribute: TokenStream) -> syn::Result<Option<Path>> {
    let metas = Punctuated::<Meta, Token![,]>::parse_terminated.parse2(attribute.clone())?;
    match metas.iter().collect::<Vec<_>>()[..] {
        [] => Ok(None),
        [meta] if meta.path().is_ident(OPTION) => read(meta).map(Some),
        _ => {
            let message = "#[wingbeat::main] takes no options but `crate`; for a runtime of your own, start it in a plain main and \
                           end with wingbeat::shutdown()";
            Err(syn::Error::new_spanned(attribute, message))
        }
    }
}

/// The code with this path in place of each `::wingbeat`.
pub(crate) fn renamed(code: TokenStream, path: Option<&Path>) -> TokenStream {
    match path {
        Some(path) => replaced(code, &path.to_token_stream()),
        None => code,
    }
}

fn replaced(code: TokenStream, path: &TokenStream) -> TokenStream {
    let mut done: Vec<TokenTree> = Vec::new();
    for token in code {
        match token {
            TokenTree::Ident(ident) if ident == "wingbeat" && is_leading(&done) => {
                done.truncate(done.len() - 2);
                done.extend(path.clone());
            }
            TokenTree::Group(group) => {
                let mut inner = Group::new(group.delimiter(), replaced(group.stream(), path));
                inner.set_span(group.span());
                done.push(inner.into());
            }
            other => done.push(other),
        }
    }
    quote!(#(#done)*)
}

/// Whether these tokens end with a `::` that begins a path, and not with one inside a path.
fn is_leading(tokens: &[TokenTree]) -> bool {
    let [before @ .., TokenTree::Punct(first), TokenTree::Punct(second)] = tokens else { return false };
    let is_colons = first.as_char() == ':' && first.spacing() == Spacing::Joint && second.as_char() == ':';
    let goes_on = match before.last() {
        Some(TokenTree::Ident(ident)) => !is_keyword(ident),
        _ => false,
    };
    is_colons && !goes_on
}

/// Whether a path cannot go on behind it, as behind `as`.
fn is_keyword(ident: &Ident) -> bool {
    let is_part = ["crate", "self", "super", "Self"].iter().any(|part| ident == part);
    !is_part && syn::parse2::<Ident>(ident.to_token_stream()).is_err()
}

#[cfg(test)]
mod tests {
    use syn::parse_quote;

    use super::*;

    /// What is left of the crate's own name.
    fn names(code: &TokenStream) -> usize {
        code.to_string().matches(":: wingbeat ::").count()
    }

    #[test]
    fn no_path_of_a_function_or_an_actor_has_the_crate_s_own_name() {
        let task = parse_quote! {
            async fn lines(path: String, x: u64) -> Result<impl Iterator<Item = Result<u64, String>>, String> { Ok(0..x) }
        };
        let as_usual = crate::remote::expand(quote!(max_retries = unlimited), &task).unwrap();
        assert!(names(&as_usual) > 10);
        let options = quote!(crate = "a::b", retry_on(Busy), max_retries = unlimited);
        let renamed = crate::remote::expand(options, &task).unwrap();
        assert_eq!(names(&renamed), 0, "{renamed}");
        assert!(renamed.to_string().contains("a :: b :: __private"), "{renamed}");
        let actor = parse_quote! {
            impl Tally {
                async fn new(start: u64) -> Result<Self, String> { Ok(Tally { n: start }) }
                fn add(&mut self, by: u64) -> u64 { self.n += by; self.n }
                #[method(num_returns = 2)]
                async fn both(&self) -> (u64, u64) { (0, self.n) }
                fn all(&self) -> impl Stream<Item = u64> + use<> { stream() }
            }
        };
        let renamed = crate::actor::expand(quote!(crate = "a::b", max_concurrency = 2), &actor).unwrap();
        assert_eq!(names(&renamed), 0, "{renamed}");
        let plain = quote!(
            #[repr(C)]
            #[plain(crate = "a::b")]
            struct Pair {
                x: u64,
                y: u64,
            }
        );
        let renamed = crate::plain::expand(&syn::parse2(plain).unwrap()).unwrap();
        assert_eq!(names(&renamed), 0, "{renamed}");
        let other = quote!(
            #[repr(C)]
            #[plain(name = "a::b")]
            struct Pair {
                x: u64,
                y: u64,
            }
        );
        assert!(
            crate::plain::expand(&syn::parse2(other).unwrap())
                .unwrap_err()
                .to_string()
                .contains("no options but `crate`")
        );
    }

    #[test]
    fn only_a_path_that_begins_with_the_name_is_another() {
        let path: Path = parse_quote!(a::b);
        let code = quote!(
            fn f(x: ::wingbeat::X) -> ::wingbeat::Y {
                x as ::wingbeat::Z;
                my::wingbeat::X;
                crate::wingbeat::X
            }
        );
        let wanted = quote!(
            fn f(x: a::b::X) -> a::b::Y {
                x as a::b::Z;
                my::wingbeat::X;
                crate::wingbeat::X
            }
        );
        assert_eq!(renamed(code.clone(), Some(&path)).to_string(), wanted.to_string());
        assert_eq!(renamed(code.clone(), None).to_string(), code.to_string());
    }

    #[test]
    fn a_path_is_written_as_text() {
        let read = |meta| read(&meta).map(|path| path.to_token_stream().to_string());
        assert_eq!(read(parse_quote!(crate = "crate::wb")).unwrap(), "crate :: wb");
        assert!(read(parse_quote!(crate = wb)).unwrap_err().to_string().contains("as text"));
        assert!(read(parse_quote!(crate)).is_err() && read(parse_quote!(crate = "2")).is_err());
        assert!(of_main(quote!()).unwrap().is_none() && of_main(quote!(crate = "wb")).unwrap().is_some());
        assert!(of_main(quote!(flavor = "x")).unwrap_err().to_string().contains("no options but `crate`"));
    }
}
