//! Options in attributes: `num_cpus = 2, retry_on(Busy), concurrency_groups(io = 2)`.

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{Expr, ExprLit, Lit, LitBool, LitStr, Meta, MetaList, Path, Token, Type};

use crate::crate_path;
use crate::function::{NumReturns, Returns};

/// As many parts of a tuple can be objects of their own.
const MOST_RETURNS: usize = 8;

/// What an attribute may say.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Place {
    Function,
    Class,
    Method,
}

impl Place {
    fn known(self) -> &'static [&'static str] {
        match self {
            Place::Function => &[
                "num_cpus",
                "num_gpus",
                "gpu_memory",
                "memory",
                "resources",
                "labels",
                "spread",
                "wait_until_feasible",
                "timeout",
                "max_retries",
                "max_memory_retries",
                "retry_errors",
                "retry_on",
                "retry_if",
                "isolated",
                "num_returns",
                "stream_ahead",
                "instances",
                crate_path::OPTION,
            ],
            Place::Class => &[
                "num_cpus",
                "num_gpus",
                "gpu_memory",
                "memory",
                "resources",
                "labels",
                "spread",
                "wait_until_feasible",
                "max_restarts",
                "max_task_retries",
                "max_pending_calls",
                "max_concurrency",
                "concurrency_groups",
                crate_path::OPTION,
            ],
            Place::Method => &["group", "timeout", "max_retries", "num_returns", "stream_ahead"],
        }
    }
}

/// What an attribute says.
#[derive(Default)]
pub(crate) struct Attributes {
    fields: Vec<TokenStream>,
    /// Which errors of a function are tried again.
    retry: Retry,
    /// A tuple is returned as so many objects.
    pub num_returns: Option<NumReturns>,
    /// The concurrency group of a method.
    pub group: Option<LitStr>,
    /// The concurrency groups that a class declares.
    pub groups: Vec<String>,
    /// Several calls may run at a time.
    pub concurrent: bool,
    /// Which instances there are of a generic function.
    pub instances: Option<MetaList>,
    /// What `::wingbeat` is called, where it is not that.
    pub crate_path: Option<Path>,
}

/// Which errors of a function are tried again.
#[derive(Default)]
struct Retry {
    /// All, or none whatever else is said.
    errors: bool,
    /// Those of these types.
    types: Vec<Type>,
    /// Those of which this holds.
    predicate: Option<Expr>,
    /// What says so of the function's own errors.
    says: Option<Meta>,
}

impl Retry {
    fn value(&self) -> TokenStream {
        let Retry { errors, types, predicate, .. } = self;
        if *errors {
            return quote!(::wingbeat::__private::RetryOn::Everything);
        }
        if types.is_empty() && predicate.is_none() {
            return quote!(::wingbeat::__private::RetryOn::Nothing);
        }
        let predicate = match predicate {
            None => quote!(::core::option::Option::None),
            Some(predicate) => {
                quote!(::core::option::Option::Some(|error| ::wingbeat::__private::retry_if(error, #predicate)))
            }
        };
        quote!(::wingbeat::__private::RetryOn::Declared(&::wingbeat::__private::Declared {
            types: &[#(::wingbeat::__private::error_name::<#types>),*],
            predicate: #predicate,
        }))
    }
}

impl Attributes {
    pub(crate) fn parse(place: Place, tokens: TokenStream) -> syn::Result<Attributes> {
        let metas = Punctuated::<Meta, Token![,]>::parse_terminated.parse2(tokens)?;
        let mut attributes = Attributes::default();
        for meta in metas {
            attributes.take_in(place, &meta)?;
        }
        Ok(attributes)
    }

    fn take_in(&mut self, place: Place, meta: &Meta) -> syn::Result<()> {
        let name = meta.path().get_ident().map(ToString::to_string).unwrap_or_default();
        if !place.known().contains(&name.as_str()) {
            let known = place.known().join(", ");
            return Err(syn::Error::new_spanned(meta.path(), format!("unknown option `{name}`; known are: {known}")));
        }
        let field = quote::format_ident!("{name}");
        if matches!(name.as_str(), "retry_on" | "retry_if") {
            self.retry.says = Some(meta.clone());
        }
        match name.as_str() {
            crate_path::OPTION => self.crate_path = Some(crate_path::read(meta)?),
            "instances" => match meta {
                Meta::List(list) => self.instances = Some(list.clone()),
                _ => return Err(syn::Error::new_spanned(meta, "write `instances(f32, f64)`, with types")),
            },
            "num_cpus" | "num_gpus" => {
                let value = number(meta)?;
                if value < 0.0 {
                    return Err(syn::Error::new_spanned(meta, format!("{name} must be zero or more")));
                }
                self.fields.push(quote!(#field: ::core::option::Option::Some(#value)));
            }
            "memory" | "gpu_memory" => {
                let value = bytes(meta)?;
                self.fields.push(quote!(#field: ::core::option::Option::Some(#value)));
            }
            "labels" => {
                let rules = text(meta)?;
                self.fields.push(quote!(labels: &[#rules]));
            }
            "resources" => {
                let Meta::List(list) = meta else {
                    return Err(syn::Error::new_spanned(meta, "write `resources(license = 1, disk = 0.5)`"));
                };
                let resources = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)?;
                let pairs = resources.iter().map(|resource| {
                    let name = resource.path().get_ident().map(ToString::to_string).unwrap_or_default();
                    let amount = number(resource)?;
                    Ok(quote!((#name, #amount)))
                });
                let pairs = pairs.collect::<syn::Result<Vec<_>>>()?;
                self.fields.push(quote!(resources: &[#(#pairs),*]));
            }
            "retry_errors" => self.retry.errors = flag(meta, "retry_errors")?,
            "isolated" | "spread" | "wait_until_feasible" => {
                let value = flag(meta, &name)?;
                self.fields.push(quote!(#field: #value));
            }
            "timeout" => {
                let millis = duration(meta)?;
                let value = quote!(::core::time::Duration::from_millis(#millis));
                self.fields.push(quote!(timeout: ::core::option::Option::Some(#value)));
            }
            "retry_on" => {
                let Meta::List(list) = meta else {
                    return Err(syn::Error::new_spanned(
                        meta,
                        "write `retry_on(Busy, TimedOut)`, with types of errors",
                    ));
                };
                let types = list.parse_args_with(Punctuated::<Type, Token![,]>::parse_terminated)?;
                if types.is_empty() {
                    return Err(syn::Error::new_spanned(
                        meta,
                        "name a type of errors; for all errors write `retry_errors`",
                    ));
                }
                self.retry.types.extend(types);
            }
            "retry_if" => match meta {
                Meta::NameValue(pair) => self.retry.predicate = Some(pair.value.clone()),
                _ => {
                    return Err(syn::Error::new_spanned(
                        meta,
                        "write `retry_if = f`, where `f` takes the error by reference",
                    ));
                }
            },
            "num_returns" => {
                let count = whole(meta)? as usize;
                if !(2..=MOST_RETURNS).contains(&count) {
                    let message = format!("2 to {MOST_RETURNS} objects; without `num_returns` a tuple is one");
                    return Err(syn::Error::new_spanned(meta, message));
                }
                self.num_returns = Some(NumReturns { count, says: meta.clone() });
            }
            "group" => self.group = Some(text(meta)?),
            "concurrency_groups" => {
                let Meta::List(list) = meta else {
                    return Err(syn::Error::new_spanned(meta, "write `concurrency_groups(io = 2, compute = 1)`"));
                };
                let groups = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)?;
                let mut pairs = Vec::new();
                for group in &groups {
                    let name = group.path().get_ident().map(ToString::to_string).unwrap_or_default();
                    let most = at_least_one(group)?;
                    pairs.push(quote!((#name, #most)));
                    self.groups.push(name);
                }
                self.concurrent = true;
                self.fields.push(quote!(groups: &[#(#pairs),*]));
            }
            "max_retries" | "max_restarts" | "max_task_retries" => {
                let value = attempts(meta)?;
                self.fields.push(quote!(#field: ::core::option::Option::Some(#value)));
            }
            _ => {
                let counts_calls = matches!(name.as_str(), "max_concurrency" | "max_pending_calls");
                let value = if counts_calls { at_least_one(meta)? } else { whole(meta)? };
                self.concurrent |= name == "max_concurrency" && value > 1;
                self.fields.push(quote!(#field: ::core::option::Option::Some(#value)));
            }
        }
        Ok(())
    }

    /// Refuses to try again errors that a function cannot give.
    pub(crate) fn check_errors(&self, returns: &Returns) -> syn::Result<()> {
        let Some(meta) = &self.retry.says else { return Ok(()) };
        let why = match returns {
            Returns::Fallible(..) => return Ok(()),
            Returns::Items(..) => "an error among the items of a stream is an item, which ends nothing",
            Returns::One(_) | Returns::Many(_) => "it does not return a `Result<T, E>`, written as that",
        };
        let message =
            format!("this function gives no errors of its own to try again: {why}; for panics write `retry_errors`");
        Err(syn::Error::new_spanned(meta, message))
    }

    /// The registry's `Defaults`.
    pub(crate) fn defaults(&self) -> TokenStream {
        let (fields, retry) = (&self.fields, self.retry.value());
        quote!(::wingbeat::__private::Defaults { #(#fields,)* retry_on: #retry, ..::wingbeat::__private::Defaults::NONE })
    }
}

fn literal(meta: &Meta) -> syn::Result<&Lit> {
    match meta {
        Meta::NameValue(pair) => match &pair.value {
            Expr::Lit(ExprLit { lit, .. }) => Ok(lit),
            other => {
                Err(syn::Error::new_spanned(other, "a literal is expected; values known at run time go to `options()`"))
            }
        },
        other => Err(syn::Error::new(other.span(), "write `name = value`")),
    }
}

/// `name`, or `name = true`.
fn flag(meta: &Meta, name: &str) -> syn::Result<bool> {
    match meta {
        Meta::Path(_) => Ok(true),
        Meta::NameValue(_) => match literal(meta)? {
            Lit::Bool(LitBool { value, .. }) => Ok(*value),
            other => Err(syn::Error::new_spanned(other, "true or false is expected")),
        },
        Meta::List(_) => Err(syn::Error::new_spanned(meta, format!("write `{name}`"))),
    }
}

fn number(meta: &Meta) -> syn::Result<f64> {
    match literal(meta)? {
        Lit::Int(value) => value.base10_parse(),
        Lit::Float(value) => value.base10_parse(),
        other => Err(syn::Error::new_spanned(other, "a number is expected")),
    }
}

/// Bytes, as a number or as text such as `8GiB`.
fn bytes(meta: &Meta) -> syn::Result<u64> {
    const UNITS: [(&str, u64); 8] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
    ];
    let literal = literal(meta)?;
    let found = match literal {
        Lit::Int(value) => return value.base10_parse(),
        Lit::Str(text) => UNITS.iter().find_map(|(unit, of)| {
            let count: u64 = text.value().strip_suffix(unit)?.trim().parse().ok()?;
            count.checked_mul(*of)
        }),
        _ => None,
    };
    found.ok_or_else(|| syn::Error::new_spanned(literal, "a number of bytes, or text such as \"8GiB\", is expected"))
}

/// A time in milliseconds, as text such as `30s`.
fn duration(meta: &Meta) -> syn::Result<u64> {
    // `ms` before `s`, which it ends with.
    const UNITS: [(&str, u64); 4] = [("ms", 1), ("min", 60_000), ("s", 1_000), ("h", 3_600_000)];
    let literal = literal(meta)?;
    let found = match literal {
        Lit::Str(text) => UNITS.iter().find_map(|(unit, of)| {
            let text = text.value();
            let count = text.strip_suffix(unit)?.trim();
            count.parse::<u64>().ok()?.checked_mul(*of)
        }),
        _ => None,
    };
    match found {
        Some(0) => {
            Err(syn::Error::new_spanned(literal, "nothing is done within no time; leave the option out for no limit"))
        }
        Some(millis) => Ok(millis),
        None => {
            Err(syn::Error::new_spanned(literal, "a time such as \"500ms\", \"30s\", \"5min\" or \"2h\" is expected"))
        }
    }
}

fn whole(meta: &Meta) -> syn::Result<u32> {
    match literal(meta)? {
        Lit::Int(value) => value.base10_parse(),
        other => Err(syn::Error::new_spanned(other, "a whole number is expected")),
    }
}

/// A number of attempts, or `unlimited`.
fn attempts(meta: &Meta) -> syn::Result<TokenStream> {
    if let Meta::NameValue(pair) = meta {
        match &pair.value {
            Expr::Path(path) if path.path.is_ident("unlimited") => return Ok(quote!(::wingbeat::__private::UNLIMITED)),
            Expr::Lit(ExprLit { lit: Lit::Int(value), .. }) if value.base10_digits().starts_with('-') => {
                return Err(syn::Error::new(value.span(), "a negative number; for no limit, write `unlimited`"));
            }
            Expr::Lit(_) => {}
            other => return Err(syn::Error::new_spanned(other, "a whole number or `unlimited` is expected")),
        }
    }
    whole(meta).map(|value| quote!(#value))
}

fn at_least_one(meta: &Meta) -> syn::Result<u32> {
    match whole(meta)? {
        0 => Err(syn::Error::new_spanned(meta, "at least one call must be able to run")),
        value => Ok(value),
    }
}

fn text(meta: &Meta) -> syn::Result<LitStr> {
    match literal(meta)? {
        Lit::Str(value) => Ok(value.clone()),
        other => Err(syn::Error::new_spanned(other, "a string is expected")),
    }
}
