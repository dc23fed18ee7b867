//! `#[actor]`: the impl block stays as it is; the type gets `remote`, and a handle type with its methods.

use proc_macro2::{Group, Ident, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote};
use syn::ext::IdentExt;
use syn::{ImplItem, ImplItemFn, ItemImpl, ReturnType, Type, Visibility};

use crate::attributes::{Attributes, Place};
use crate::crate_path;
use crate::function::{self, Parameter, Returns};

pub(crate) fn expand(attribute: TokenStream, item: &ItemImpl) -> syn::Result<TokenStream> {
    let class = Attributes::parse(Place::Class, attribute)?;
    if let Some((_, path, _)) = &item.trait_ {
        return Err(syn::Error::new_spanned(path, "#[actor] is for the type's own impl block, not for a trait's"));
    }
    if !item.generics.params.is_empty() {
        return Err(syn::Error::new_spanned(
            &item.generics,
            "an actor cannot be generic: another process must know which instance to make; wrap the instance in a type of its own",
        ));
    }
    let Type::Path(path) = &*item.self_ty else {
        return Err(syn::Error::new_spanned(&item.self_ty, "#[actor] is for a named type"));
    };
    let Some(name) = path.path.get_ident() else {
        return Err(syn::Error::new_spanned(path, "name the type alone: put the impl block where the type is"));
    };
    // The block itself must not carry our inner attributes.
    let mut kept = item.clone();
    let mut constructor = None;
    let mut methods = Vec::new();
    for entry in &mut kept.items {
        let ImplItem::Fn(function) = entry else { continue };
        let attributes = take_method_attribute(function)?;
        refuse_reserved(function)?;
        if function.sig.ident == "new" && function.sig.receiver().is_none() {
            constructor = Some(named_self(function, name)?);
        } else if function.sig.receiver().is_some() {
            let attributes = attributes.unwrap_or_default();
            refuse_unknown_group(&class, &attributes)?;
            methods.push((named_self(function, name)?, attributes));
        } else if attributes.is_some() {
            return Err(syn::Error::new_spanned(&function.sig, "#[method] is for functions with a receiver"));
        }
    }
    let Some(constructor) = constructor else {
        return Err(syn::Error::new_spanned(name, "an actor needs a constructor: fn new(…) -> Self"));
    };
    let cell = if class.concurrent { quote!(Shared) } else { quote!(Exclusive) };
    let construct = Constructor::read(&constructor)?;
    let methods: Vec<Method> =
        methods.iter().map(|(function, attributes)| Method::read(function, attributes)).collect::<syn::Result<_>>()?;
    let visibility = &constructor.vis;
    let code = generate(name, visibility, &class, &cell, &construct, &methods);
    let code = crate_path::renamed(code, class.crate_path.as_ref());
    Ok(quote!(#kept #code))
}

/// Names that the macro itself gives to the type or to its handle.
fn refuse_reserved(function: &ImplItemFn) -> syn::Result<()> {
    let name = &function.sig.ident;
    let of_handle = function.sig.receiver().is_some() && ["actor", "with"].iter().any(|taken| name == taken);
    if of_handle || ["remote", "options", "named", "named_in"].iter().any(|taken| name == taken) {
        let message = format!("`{name}` is what #[actor] itself adds here; choose another name");
        return Err(syn::Error::new_spanned(name, message));
    }
    Ok(())
}

/// Nothing would ever run the calls of a group that is not declared.
fn refuse_unknown_group(class: &Attributes, method: &Attributes) -> syn::Result<()> {
    let Some(group) = &method.group else { return Ok(()) };
    if class.groups.contains(&group.value()) {
        return Ok(());
    }
    let text = group.value();
    let message = match class.groups.join(", ") {
        known if known.is_empty() => format!("declare the group: #[actor(concurrency_groups({text} = 1))]"),
        known => format!("the actor has no concurrency group `{text}`; it has: {known}"),
    };
    Err(syn::Error::new_spanned(group, message))
}

/// The function with the type's name for `Self` in its signature, which is written again in the handle's impl block.
fn named_self(function: &ImplItemFn, class: &Ident) -> syn::Result<ImplItemFn> {
    let mut function = function.clone();
    function.sig = syn::parse2(replace_self(function.sig.to_token_stream(), class))?;
    Ok(function)
}

fn replace_self(tokens: TokenStream, class: &Ident) -> TokenStream {
    let replaced = tokens.into_iter().map(|token| match token {
        TokenTree::Ident(ident) if ident == "Self" => Ident::new(&class.to_string(), ident.span()).into(),
        TokenTree::Group(group) => {
            let mut inner = Group::new(group.delimiter(), replace_self(group.stream(), class));
            inner.set_span(group.span());
            inner.into()
        }
        other => other,
    });
    replaced.collect()
}

/// The block as the compiler can read it without us.
pub(crate) fn without_method_attributes(item: &ItemImpl) -> ItemImpl {
    let mut item = item.clone();
    for entry in &mut item.items {
        if let ImplItem::Fn(function) = entry {
            function.attrs.retain(|attribute| !is_ours(attribute));
        }
    }
    item
}

fn is_ours(attribute: &syn::Attribute) -> bool {
    attribute.path().segments.last().is_some_and(|segment| segment.ident == "method")
}

fn take_method_attribute(function: &mut ImplItemFn) -> syn::Result<Option<Attributes>> {
    let Some(at) = function.attrs.iter().position(is_ours) else { return Ok(None) };
    let attribute = function.attrs.remove(at);
    let tokens = match &attribute.meta {
        syn::Meta::List(list) => list.tokens.clone(),
        other => return Err(syn::Error::new_spanned(other, "write #[method(group = \"name\")]")),
    };
    Attributes::parse(Place::Method, tokens).map(Some)
}

struct Constructor {
    parameters: Vec<Parameter>,
    text: String,
    /// The type of its error, if it may fail.
    error: Option<Type>,
    is_async: bool,
}

impl Constructor {
    fn read(function: &ImplItemFn) -> syn::Result<Constructor> {
        function::check_concrete(&function.sig)?;
        function::check(&function.sig)?;
        let error = match &function.sig.output {
            ReturnType::Default => {
                return Err(syn::Error::new_spanned(&function.sig, "the constructor returns Self or Result<Self, E>"));
            }
            ReturnType::Type(_, ty) => match function::returns(&syn::parse_quote!(-> #ty), None)? {
                Returns::Fallible(_, error) => Some(error),
                _ => None,
            },
        };
        Ok(Constructor {
            parameters: function::parameters(&function.sig)?,
            text: function::text(&function.sig),
            error,
            is_async: function.sig.asyncness.is_some(),
        })
    }
}

/// A method as it is written: a field for each part of it that the macro writes again.
struct Method {
    name: Ident,
    /// Name of its registry entry.
    entry: Ident,
    docs: Vec<syn::Attribute>,
    /// Conditions under which it exists.
    cfgs: Vec<syn::Attribute>,
    visibility: Visibility,
    parameters: Vec<Parameter>,
    returns: Returns,
    text: String,
    is_mut: bool,
    is_async: bool,
    /// Whether the items of a stream may borrow from the actor.
    items_borrow: bool,
    group: TokenStream,
    defaults: TokenStream,
}

impl Method {
    fn read(function: &ImplItemFn, attributes: &Attributes) -> syn::Result<Method> {
        let signature = &function.sig;
        function::check_concrete(signature)?;
        function::check(signature)?;
        let is_mut = match signature.receiver() {
            Some(receiver) if receiver.reference.is_some() => receiver.mutability.is_some(),
            _ => {
                let message = "a method of an actor takes &self or &mut self: the actor stays where it is";
                return Err(syn::Error::new_spanned(&signature.inputs, message));
            }
        };
        let group = match &attributes.group {
            Some(group) => quote!(::core::option::Option::Some(#group)),
            None => quote!(::core::option::Option::None),
        };
        Ok(Method {
            entry: format_ident!("METHOD_{}", signature.ident.unraw().to_string().to_uppercase()),
            name: signature.ident.clone(),
            docs: function.attrs.iter().filter(|attribute| attribute.path().is_ident("doc")).cloned().collect(),
            cfgs: function.attrs.iter().filter(|attribute| attribute.path().is_ident("cfg")).cloned().collect(),
            visibility: function.vis.clone(),
            parameters: function::parameters(signature)?,
            returns: function::returns(&signature.output, attributes.num_returns.as_ref())?,
            text: function::text(signature),
            is_mut,
            is_async: signature.asyncness.is_some(),
            items_borrow: !function::captures_nothing(&signature.output),
            group,
            defaults: attributes.defaults(),
        })
    }

    /// The registry entry, with the function that decodes the arguments and calls the method.
    fn entry(&self, class: &Ident, cell: &TokenStream) -> TokenStream {
        let Method { name, entry, cfgs, parameters, returns, text, group, defaults, .. } = self;
        let arguments = function::arguments();
        let texts = parameters.iter().map(|parameter| parameter.name.to_string());
        let (decode, outputs, run) = (function::decode(parameters), returns.outputs(), self.body());
        let path = format!("{class}::{name}");
        quote! {
            #(#cfgs)*
            static #entry: ::wingbeat::__private::Method = {
                const PATH: &str = ::core::concat!(::core::module_path!(), "::", #path);
                fn run(
                    instance: ::wingbeat::__private::Instance,
                    mut #arguments: ::wingbeat::__private::Arguments,
                ) -> ::core::result::Result<::wingbeat::__private::Running, ::wingbeat::Error> {
                    let cell = ::wingbeat::__private::cell::<::wingbeat::__private::#cell<#class>>(instance, PATH)?;
                    #decode
                    ::core::result::Result::Ok(#run)
                }
                ::wingbeat::__private::Method {
                    path: PATH,
                    signature: #text,
                    parameters: &[#(#texts),*],
                    outputs: #outputs,
                    group: #group,
                    defaults: #defaults,
                    run,
                    checked: ::core::sync::atomic::AtomicU32::new(0),
                }
            };
        }
    }

    fn body(&self) -> TokenStream {
        let name = &self.name;
        let locals = self.parameters.iter().map(|parameter| &parameter.local);
        let lock = if self.is_mut { quote!(write) } else { quote!(read) };
        let guard = if self.is_mut { quote!(let mut guard) } else { quote!(let guard) };
        let call = quote!(guard.#name(#(#locals),*));
        if self.returns.is_items() {
            let finish = self.returns.finish_item(&quote!(item));
            let call = if self.is_async { quote!(#call.await) } else { call };
            let source = if self.items_borrow { call.clone() } else { quote!(source) };
            let each = if self.returns.is_async_stream() {
                quote! {
                    let mut source = ::std::pin::pin!(#source);
                    while let ::core::option::Option::Some(item) = ::wingbeat::__private::StreamExt::next(&mut source).await {
                        items.send(#finish).await;
                    }
                }
            } else {
                quote! {
                    for item in #source {
                        items.send(#finish).await;
                    }
                }
            };
            let is_async = self.is_async || self.returns.is_async_stream();
            let kind = if is_async { quote!(Stream) } else { quote!(ItemsOfActor) };
            if self.items_borrow {
                // The lock is held as long as the stream.
                return quote! {
                    ::wingbeat::__private::Running::#kind(::wingbeat::__private::yielding(move |mut items| async move {
                        #guard = cell.#lock().await;
                        #each
                    }))
                };
            }
            return quote! {
                ::wingbeat::__private::Running::#kind(::wingbeat::__private::yielding(move |mut items| async move {
                    let source = {
                        #guard = cell.#lock().await;
                        #call
                    };
                    #each
                }))
            };
        }
        if self.is_async {
            let finish = self.returns.finish(&quote!(#call.await));
            return quote! {
                ::wingbeat::__private::Running::Future(::std::boxed::Box::pin(async move {
                    #guard = cell.#lock().await;
                    #finish
                }))
            };
        }
        let finish = self.returns.finish(&call);
        let run = if self.is_mut { quote!(run_write) } else { quote!(run_read) };
        quote!(cell.#run(move |guard| #finish))
    }

    /// The method of the handle.
    fn on_handle(&self) -> TokenStream {
        let Method { name, entry, docs, cfgs, visibility, parameters, returns, .. } = self;
        let names: Vec<_> = parameters.iter().map(|parameter| &parameter.name).collect();
        let types: Vec<_> = parameters.iter().map(|parameter| &parameter.ty).collect();
        let (refs, marker) = (returns.refs(), returns.marker());
        quote! {
            #(#docs)*
            #(#cfgs)*
            #[allow(clippy::too_many_arguments, dead_code)]
            #visibility fn #name(&self, #(#names: impl ::wingbeat::IntoArg<#types>),*) -> #refs {
                ::wingbeat::TaskOptions::<fn(#(#types),*) -> #marker>::of_method(&self.actor, &#entry).remote(#(#names),*)
            }
        }
    }
}

fn generate(
    name: &Ident,
    visibility: &Visibility,
    class: &Attributes,
    cell: &TokenStream,
    constructor: &Constructor,
    methods: &[Method],
) -> TokenStream {
    let handle = format_ident!("{name}Handle");
    let (handle_doc, name_text) =
        (format!("A handle of a [`{name}`] that lives in a process of its own."), name.to_string());
    let entries = methods.iter().map(|method| method.entry(name, cell));
    let listed = methods.iter().map(|Method { cfgs, entry, .. }| quote!(#(#cfgs)* &#entry));
    let on_handle = methods.iter().map(Method::on_handle);
    let names: Vec<_> = constructor.parameters.iter().map(|parameter| &parameter.name).collect();
    let types: Vec<_> = constructor.parameters.iter().map(|parameter| &parameter.ty).collect();
    let texts = names.iter().map(ToString::to_string);
    let locals: Vec<_> = constructor.parameters.iter().map(|parameter| &parameter.local).collect();
    let arguments = function::arguments();
    let (decode, text, defaults) = (function::decode(&constructor.parameters), &constructor.text, class.defaults());
    let made = match (constructor.error.is_some(), constructor.is_async) {
        (false, false) => quote!(::core::result::Result::Ok(#name::new(#(#locals),*))),
        (false, true) => quote!(::core::result::Result::Ok(#name::new(#(#locals),*).await)),
        (true, false) => quote!(#name::new(#(#locals),*)),
        (true, true) => quote!(#name::new(#(#locals),*).await),
    };
    let finish = if let Some(error) = &constructor.error {
        let failed = function::failed(error);
        quote! {
            match #made {
                ::core::result::Result::Ok(made) => ::core::result::Result::Ok(::wingbeat::__private::#cell::instance(made)),
                ::core::result::Result::Err(error) => #failed,
            }
        }
    } else {
        quote!(::core::result::Result::map(#made, ::wingbeat::__private::#cell::instance))
    };
    let construct = if constructor.is_async {
        quote!(::wingbeat::__private::Constructing::Future(::std::boxed::Box::pin(async move { #finish })))
    } else {
        quote!(::wingbeat::__private::Constructing::Done(#finish))
    };
    quote! {
        #[doc = #handle_doc]
        #[derive(Clone, Debug)]
        #visibility struct #handle {
            actor: ::wingbeat::ActorRef,
        }

        #[allow(non_upper_case_globals)]
        const _: () = {
            const PATH: &str = ::core::concat!(::core::module_path!(), "::", #name_text);

            #(#entries)*

            fn construct(mut #arguments: ::wingbeat::__private::Arguments)
                -> ::core::result::Result<::wingbeat::__private::Constructing, ::wingbeat::Error>
            {
                #decode
                ::core::result::Result::Ok(#construct)
            }

            static CLASS: ::wingbeat::__private::Class = ::wingbeat::__private::Class {
                path: PATH,
                signature: #text,
                parameters: &[#(#texts),*],
                defaults: #defaults,
                construct,
                methods: &[#(#listed),*],
                checked: ::core::sync::atomic::AtomicU32::new(0),
            };

            ::wingbeat::__private::inventory::submit! {
                ::wingbeat::__private::Entry::Class(&CLASS)
            }

            #[allow(dead_code, clippy::too_many_arguments)]
            impl #name {
                /// Makes an actor in a worker process of its own. What goes wrong is what its calls give.
                #visibility fn remote(#(#names: impl ::wingbeat::IntoArg<#types>),*) -> #handle {
                    Self::options().remote(#(#names),*)
                }

                /// Options for one actor; `.remote(…)` makes it.
                #visibility fn options() -> ::wingbeat::ActorOptions<fn(#(#types),*) -> #handle> {
                    ::wingbeat::ActorOptions::of(&CLASS)
                }

                /// Finds the actor of this name in the session's namespace.
                ///
                /// # Errors
                /// There is none, or it is of another class.
                #visibility async fn named(name: &str) -> ::wingbeat::Result<#handle> {
                    ::wingbeat::__private::find_actor(&CLASS, name, ::core::option::Option::None).await
                }

                /// As [`named`](Self::named), in another namespace.
                ///
                /// # Errors
                /// As `named`.
                #visibility async fn named_in(namespace: &str, name: &str) -> ::wingbeat::Result<#handle> {
                    ::wingbeat::__private::find_actor(&CLASS, name, ::core::option::Option::Some(namespace)).await
                }
            }

            #[allow(dead_code)]
            impl #handle {
                #(#on_handle)*

                /// The actor itself: its id, and ways to end it.
                #visibility fn actor(&self) -> &::wingbeat::ActorRef {
                    &self.actor
                }

                /// This handle with options for the calls that are made through it.
                #visibility fn with(&self, options: ::wingbeat::CallOptions) -> #handle {
                    #handle { actor: self.actor.with(options) }
                }
            }

            impl ::core::convert::From<::wingbeat::ActorRef> for #handle {
                fn from(actor: ::wingbeat::ActorRef) -> Self {
                    #handle { actor }
                }
            }

            impl ::wingbeat::ActorHandle for #handle {
                fn class() -> &'static ::wingbeat::__private::Class {
                    &CLASS
                }
            }

            impl ::wingbeat::__private::serde::Serialize for #handle {
                fn serialize<S: ::wingbeat::__private::serde::Serializer>(
                    &self,
                    serializer: S,
                ) -> ::core::result::Result<S::Ok, S::Error> {
                    self.actor.serialize_for(serializer)
                }
            }

            impl<'de> ::wingbeat::__private::serde::Deserialize<'de> for #handle {
                fn deserialize<D: ::wingbeat::__private::serde::Deserializer<'de>>(
                    deserializer: D,
                ) -> ::core::result::Result<Self, D::Error> {
                    ::wingbeat::ActorRef::deserialize_as(deserializer, &CLASS).map(|actor| #handle { actor })
                }
            }
        };
    }
}
