use wingbeat_core::ActorId;
use wingbeat_core::error::Result;
use wingbeat_process::Session;

/// An actor that has a name, and that is not dead.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct NamedActor {
    /// The actor.
    pub id: ActorId,
    /// Names are unique within a namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Crate, modules and name of its class.
    pub class_name: String,
    /// `starting`, `alive` or `restarting`.
    pub state: String,
}

/// The named actors of the cluster, those of other programs included: in this program's namespace, or in all with
/// [`list_named_actors_everywhere`]. A handle to one is `Class::named(name)`, or
/// [`ActorRef::named`](crate::ActorRef::named) whatever its class.
///
/// ```no_run
/// # async fn run() -> wingbeat::Result<()> {
/// for actor in wingbeat::list_named_actors().await? {
///     println!("{}: {}", actor.name, actor.class_name);
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// There is no session, or the head is gone.
pub async fn list_named_actors() -> Result<Vec<NamedActor>> {
    in_namespace(&Session::current()?).await
}

pub(crate) async fn in_namespace(session: &Session) -> Result<Vec<NamedActor>> {
    let mut actors = listed(session).await?;
    actors.retain(|actor| actor.namespace == session.namespace());
    Ok(actors)
}

/// As [`list_named_actors`], in all namespaces.
///
/// # Errors
/// As `list_named_actors`.
pub async fn list_named_actors_everywhere() -> Result<Vec<NamedActor>> {
    listed(&Session::current()?).await
}

/// By namespace and name.
async fn listed(session: &Session) -> Result<Vec<NamedActor>> {
    let actors = session.cluster_state().await?.actors;
    let named = actors.into_iter().filter_map(|row| {
        let name = row.name?;
        let (id, class_name, state) = (row.id, row.class_name, row.state);
        Some(NamedActor { id, namespace: name.namespace, name: name.name, class_name, state })
    });
    let mut named: Vec<NamedActor> = named.collect();
    named.sort_by(|one, other| (&one.namespace, &one.name).cmp(&(&other.namespace, &other.name)));
    Ok(named)
}
