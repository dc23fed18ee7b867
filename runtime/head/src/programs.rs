//! The executables of detached actors, by their content.
//!
//! A detached actor outlives its driver, and may have to start again on a node that never had the driver's program, or
//! under another head. So whoever makes one gives the head its program first, once for all actors of that program. With a
//! journal it lies in a folder beside that, else in memory. It goes when no detached actor needs it any more. Nodes ask for
//! it when the driver does not answer.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Executable;
use wingbeat_net::limits::limits;
use wingbeat_net::mux;
use wingbeat_net::services::{HeadClient, ProcessClient};

use crate::files;

/// A piece of a program that a node asks for: large enough that round trips do not matter.
const CHUNK: usize = 1 << 20;
/// Letters of a hash.
const HASH: usize = 64;

/// The programs that are kept.
pub(crate) struct Programs {
    /// Where they lie; none for in memory.
    folder: Option<PathBuf>,
    kept: Mutex<BTreeMap<String, Program>>,
}

#[derive(Default)]
struct Program {
    /// Open for reading, once it is complete.
    file: Option<Arc<File>>,
    /// What brings it here, until it is complete or could not be had.
    receiving: Option<Receiving>,
    /// Creations of actors that are under way and will need it, and whoever receives it.
    creations: usize,
}

/// Who gives a program.
#[derive(Clone)]
pub(crate) enum Giver {
    /// A process that runs it.
    Process(ProcessClient),
    /// The head, to its standby.
    #[cfg_attr(not(feature = "journal"), allow(dead_code, reason = "a standby keeps a journal"))]
    Head(HeadClient),
}

impl Giver {
    async fn read(&self, hash: &str, offset: u64) -> Result<Payload, Error> {
        let limit = mux::within(limits().chunk);
        match self {
            Giver::Process(process) => {
                mux::answered(process.read_executable(limit, offset).await, "the actor's creator")?
            }
            Giver::Head(head) => {
                let read = mux::answered(head.read_program(limit, hash.to_owned(), offset).await, "the head")??;
                read.ok_or_else(|| failed(hash, "the head has it no more"))
            }
        }
    }
}

/// A program on its way, for all who wait for it.
type Receiving = Shared<BoxFuture<'static, Result<(), Error>>>;

/// As long as this lives, the program is kept.
pub(crate) struct Keeping {
    programs: Arc<Programs>,
    hash: String,
}

impl Drop for Keeping {
    fn drop(&mut self) {
        let mut kept = self.programs.kept.lock();
        if let Some(program) = kept.get_mut(&self.hash) {
            program.creations -= 1;
        }
    }
}

fn failed(what: &str, why: impl std::fmt::Display) -> Error {
    Error::Failed { what: format!("keeping the program of a detached actor ({what})"), why: why.to_string() }
}

/// Does something with the disk, on a thread that may wait for it.
async fn on_disk<T: Send + 'static>(work: impl FnOnce() -> std::io::Result<T> + Send + 'static) -> Result<T, String> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(std::io::Error::other).flatten().map_err(|error| error.to_string())
}

fn is_hash(text: &str) -> bool {
    text.len() == HASH && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

impl Programs {
    pub(crate) fn in_memory() -> Programs {
        Programs { folder: None, kept: Mutex::default() }
    }

    /// In the folder beside a journal, with what an earlier head kept there.
    ///
    /// # Errors
    /// The folder cannot be read, or is not this user's alone: what lies in it is run.
    #[cfg(any(feature = "journal", test))]
    pub(crate) fn beside(journal: &Path) -> Result<Programs, Error> {
        let folder = files::beside(&files::real_path(journal), ".programs");
        let mut kept = BTreeMap::new();
        let unreadable = |error: std::io::Error| failed(&folder.display().to_string(), error);
        match std::fs::symlink_metadata(&folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(unreadable(error)),
            Ok(meta) => {
                check_private(&folder, &meta)?;
                for entry in std::fs::read_dir(&folder).map_err(unreadable)? {
                    let entry = entry.map_err(unreadable)?;
                    let name = entry.file_name().into_string().unwrap_or_default();
                    if is_hash(&name) {
                        let file = File::open(entry.path()).map_err(unreadable)?;
                        kept.insert(name, Program { file: Some(Arc::new(file)), ..Program::default() });
                    } else {
                        // A head was killed while it received it.
                        let _ = std::fs::remove_file(entry.path());
                    }
                }
            }
        }
        Ok(Programs { folder: Some(folder), kept: Mutex::new(kept) })
    }

    /// Whether the program has a hash by which others could ask for it.
    pub(crate) fn can_keep(program: &Executable) -> bool {
        is_hash(&program.hash)
    }

    /// Keeps a program, which a process that runs it gives if it is not here yet.
    ///
    /// # Errors
    /// The process is gone or runs another program, or there is no room.
    pub(crate) async fn keep(self: &Arc<Self>, program: &Executable, from: Option<Giver>) -> Result<Keeping, Error> {
        self.kept.lock().entry(program.hash.clone()).or_default().creations += 1;
        let keeping = Keeping { programs: self.clone(), hash: program.hash.clone() };
        loop {
            let (receiving, is_ours) = {
                let mut kept = self.kept.lock();
                let entry = kept.entry(program.hash.clone()).or_default();
                if entry.file.is_some() {
                    return Ok(keeping);
                }
                // One that is over and left nothing has panicked.
                match entry.receiving.as_ref().filter(|receiving| receiving.peek().is_none()) {
                    Some(receiving) => (receiving.clone(), false),
                    None => {
                        let from = from.clone();
                        let from =
                            from.ok_or_else(|| failed(&program.path, "who asks for the actor is not connected"))?;
                        entry.creations += 1;
                        let keeping = Keeping { programs: self.clone(), hash: program.hash.clone() };
                        (entry.receiving.insert(begin_to_receive(keeping, program.clone(), from)).clone(), true)
                    }
                }
            };
            match receiving.await {
                Ok(()) => return Ok(keeping),
                Err(error) if is_ours => return Err(error),
                // Whoever gave it is gone, and this one may not be.
                Err(_) => {}
            }
        }
    }

    async fn receive(&self, program: &Executable, from: &Giver) -> Result<Arc<File>, Error> {
        let failed = |why: String| failed(&program.path, why);
        // Waiting for the disk must not stop the head.
        let (folder, name) = (self.folder.clone(), program.hash.clone());
        let mut copy = on_disk(move || Copy::begin(folder.as_deref(), &name)).await.map_err(failed)?;
        let mut hash = blake3::Hasher::new();
        let mut offset = 0;
        while offset < program.size {
            let Payload(chunk) = from.read(&program.hash, offset).await?;
            if chunk.is_empty() {
                break;
            }
            hash.update(&chunk);
            offset += chunk.len() as u64;
            let writing = on_disk(move || copy.file.write_all(&chunk).map(|()| copy));
            copy = writing.await.map_err(failed)?;
        }
        let got = hash.finalize().to_hex().to_string();
        if got != program.hash {
            return Err(failed(format!("its content has the hash {got}, and {} was announced", program.hash)));
        }
        on_disk(move || copy.complete()).await.map(Arc::new).map_err(failed)
    }

    /// Lets go of all programs but these and those of creations that are under way.
    pub(crate) fn keep_only(&self, needed: &BTreeSet<String>) {
        let mut kept = self.kept.lock();
        kept.retain(|hash, program| {
            let stays = program.creations > 0 || needed.contains(hash);
            if let Some(folder) = self.folder.as_ref().filter(|_| !stays) {
                let _ = std::fs::remove_file(folder.join(hash));
            }
            stays
        });
        if let Some(folder) = self.folder.as_ref().filter(|_| kept.is_empty()) {
            // It is there only while something is in it.
            let _ = std::fs::remove_dir(folder);
        }
    }

    /// Whether a program is here, or on its way.
    #[cfg(feature = "journal")]
    pub(crate) fn has(&self, hash: &str) -> bool {
        let kept = self.kept.lock();
        kept.get(hash).is_some_and(|kept| kept.file.is_some() || kept.receiving.is_some())
    }

    /// A piece of a program; none if it is not kept.
    ///
    /// # Errors
    /// It cannot be read.
    pub(crate) fn read(&self, hash: &str, offset: u64) -> Result<Option<Payload>, Error> {
        let Some(file) = self.kept.lock().get(hash).and_then(|kept| kept.file.clone()) else { return Ok(None) };
        let mut chunk = vec![0; CHUNK];
        let mut len = 0;
        while len < CHUNK {
            match file.read_at(&mut chunk[len..], offset + len as u64) {
                Ok(0) => break,
                Ok(read) => len += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(failed("reading it", error)),
            }
        }
        chunk.truncate(len);
        Ok(Some(Payload(chunk.into())))
    }
}

/// A task of its own, which ends with the connection of whoever gives the program: those who wait for it may give up, and the
/// next then need not begin anew. What nobody needs after all goes when the programs that are needed change.
fn begin_to_receive(keeping: Keeping, program: Executable, from: Giver) -> Receiving {
    let receiving = tokio::spawn(async move {
        let received = keeping.programs.receive(&program, &from).await;
        if let Some(entry) = keeping.programs.kept.lock().get_mut(&program.hash) {
            entry.receiving = None;
            entry.file = received.as_ref().ok().cloned();
        }
        received.map(drop)
    });
    let ended =
        |ended: Result<_, tokio::task::JoinError>| ended.unwrap_or_else(|error| Err(failed("receiving it", error)));
    receiving.map(ended).boxed().shared()
}

fn check_private(folder: &Path, meta: &std::fs::Metadata) -> Result<(), Error> {
    let is_ours = meta.is_dir() && meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o077 == 0;
    let why = "it is no folder, somebody else's, or open to others, and what lies in it is run; move it away";
    if is_ours { Ok(()) } else { Err(failed(&folder.display().to_string(), why)) }
}

/// A program that is being received.
struct Copy {
    file: File,
    /// Where it lies now and where it will; none in memory.
    paths: Option<(PathBuf, PathBuf)>,
}

impl Copy {
    fn begin(folder: Option<&Path>, hash: &str) -> std::io::Result<Copy> {
        let Some(folder) = folder else {
            let file = rustix::fs::memfd_create("wingbeat-program", rustix::fs::MemfdFlags::CLOEXEC)?;
            return Ok(Copy { file: file.into(), paths: None });
        };
        match DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        check_private(folder, &std::fs::symlink_metadata(folder)?).map_err(std::io::Error::other)?;
        let part = folder.join(format!("{hash}.part"));
        let _ = std::fs::remove_file(&part);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&part)?;
        Ok(Copy { file, paths: Some((part, folder.join(hash))) })
    }

    /// It is whole: from now on it survives the machine.
    fn complete(mut self) -> std::io::Result<File> {
        if let Some((part, whole)) = &self.paths {
            self.file.sync_all()?;
            std::fs::rename(part, whole)?;
            if let Some(folder) = whole.parent() {
                files::sync_folder(folder);
            }
        }
        self.paths = None;
        self.file.try_clone()
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if let Some((part, _)) = &self.paths {
            let _ = std::fs::remove_file(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use tarpc::context::Context;
    use tokio::net::UnixStream;
    use tokio::sync::{Semaphore, mpsc};
    use wingbeat_core::{ObjectId, TaskId};
    use wingbeat_net::address::Stream;
    use wingbeat_net::messages::{HeadEvent, LogLine, PeerMessage, ProcessStacks, TaskStanding, WorkerCommand};
    use wingbeat_net::mux::Waiting;
    use wingbeat_net::services::{Process, ProcessRequest, ProcessResponse};

    use super::*;

    fn hash(of: &[u8]) -> String {
        blake3::hash(of).to_hex().to_string()
    }

    /// As if a process had given it.
    fn put(programs: &Programs, content: &[u8]) -> String {
        let name = hash(content);
        let mut copy = Copy::begin(programs.folder.as_deref(), &name).unwrap();
        copy.file.write_all(content).unwrap();
        let file = Some(Arc::new(copy.complete().unwrap()));
        programs.kept.lock().insert(name.clone(), Program { file, ..Program::default() });
        name
    }

    fn read(programs: &Programs, hash: &str) -> Option<Vec<u8>> {
        let mut content = Vec::new();
        loop {
            let Payload(chunk) = programs.read(hash, content.len() as u64).unwrap()?;
            if chunk.is_empty() {
                return Some(content);
            }
            content.extend_from_slice(&chunk);
        }
    }

    #[test]
    fn the_next_head_finds_programs_whole_and_private_and_drops_what_nobody_needs() {
        let dir = tempfile::tempdir().unwrap();
        let journal = dir.path().join("journal");
        let folder = dir.path().join("journal.programs");
        let large: Vec<u8> = (0..3 * CHUNK / 2).map(|byte| byte as u8).collect();
        let first = Programs::beside(&journal).unwrap();
        assert!(!folder.exists(), "nothing is made before something is kept");
        let (kept, dropped) = (put(&first, &large), put(&first, b"a program"));
        assert_eq!(std::fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        std::fs::write(folder.join(format!("{kept}.part")), "half").unwrap();
        let next = Programs::beside(&journal).unwrap();
        assert_eq!(read(&next, &kept), Some(large));
        next.keep_only(&BTreeSet::from([kept.clone()]));
        assert_eq!(read(&next, &dropped), None);
        let left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [kept.as_str()]);
        next.keep_only(&BTreeSet::new());
        assert!(!folder.exists());
    }

    #[test]
    fn without_a_journal_they_are_in_memory() {
        let programs = Programs::in_memory();
        let kept = put(&programs, b"a program");
        assert_eq!(read(&programs, &kept).unwrap(), b"a program");
    }

    #[tokio::test]
    async fn what_an_actor_that_is_being_made_will_need_stays() {
        let programs = Arc::new(Programs::in_memory());
        let kept = put(&programs, b"a program");
        let program = Executable { hash: kept.clone(), size: 9, ..Executable::default() };
        let keeping = programs.keep(&program, None).await.unwrap();
        programs.keep_only(&BTreeSet::new());
        assert!(read(&programs, &kept).is_some());
        drop(keeping);
        programs.keep_only(&BTreeSet::new());
        assert!(read(&programs, &kept).is_none());
    }

    /// A process that gives its program byte by byte, as far as it may.
    #[derive(Clone)]
    struct Slow {
        program: &'static [u8],
        may_give: Arc<Semaphore>,
        asked: mpsc::UnboundedSender<u64>,
    }

    impl Process for Slow {
        async fn deliver(self, _: Context, _: u64, _: u64, _: Vec<PeerMessage>) {}
        async fn head_events(self, _: Context, _: u64, _: Vec<HeadEvent>) {}
        async fn commands(self, _: Context, _: Vec<WorkerCommand>) {}
        async fn logs(self, _: Context, _: Vec<LogLine>) {}
        async fn explain_task(self, _: Context, _: TaskId) -> TaskStanding {
            panic!("nobody asks about a task")
        }
        async fn stacks(self, _: Context) -> Result<ProcessStacks, Error> {
            panic!("nobody asks for its threads")
        }
        async fn keeps(self, _: Context, _: Vec<ObjectId>, _: bool) -> Vec<ObjectId> {
            Vec::new()
        }
        async fn read_executable(self, _: Context, offset: u64) -> Result<Payload, Error> {
            self.asked.send(offset).unwrap();
            self.may_give.acquire().await.unwrap().forget();
            let at = offset as usize;
            Ok(Payload(self.program[at..at + 1].into()))
        }
    }

    impl Slow {
        fn new(program: &'static [u8]) -> (Slow, mpsc::UnboundedReceiver<u64>) {
            let (asked, questions) = mpsc::unbounded_channel();
            (Slow { program, may_give: Arc::new(Semaphore::new(0)), asked }, questions)
        }

        /// What the head asks it by, and its end of the connection.
        fn connect(&self) -> (ProcessClient, mux::Connection) {
            let (here, there) = UnixStream::pair().unwrap();
            let connect = |stream| {
                let stream = Stream::Unix(stream);
                mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(
                    stream,
                    Waiting::Asleep,
                )
            };
            let (connection, _, server) = connect(there);
            tokio::spawn(mux::serve(server, self.clone().serve()));
            let (_, client, _) = connect(here);
            (ProcessClient::new(mux::client_config(), client).spawn(), connection)
        }
    }

    fn executable(of: &[u8]) -> Executable {
        Executable { hash: hash(of), size: of.len() as u64, ..Executable::default() }
    }

    #[tokio::test]
    async fn a_program_goes_on_arriving_when_nobody_waits_any_more_and_the_next_who_asks_gets_that() {
        let programs = Arc::new(Programs::in_memory());
        let (giver, mut asked) = Slow::new(b"abc");
        let (client, _connection) = giver.connect();
        let program = executable(b"abc");
        giver.may_give.add_permits(1);
        let mut first = Box::pin(programs.keep(&program, Some(Giver::Process(client.clone()))));
        tokio::select! {
            _ = &mut first => panic!("it cannot be there"),
            _ = async { while asked.recv().await != Some(1) {} } => {}
        }
        // The deadline of the request is over.
        drop(first);
        programs.keep_only(&BTreeSet::new());
        giver.may_give.add_permits(2);
        let keeping = programs.keep(&program, Some(Giver::Process(client))).await.unwrap();
        assert_eq!(asked.recv().await, Some(2));
        assert!(asked.try_recv().is_err(), "nothing was asked for twice");
        assert_eq!(read(&programs, &program.hash).unwrap(), b"abc");
        drop(keeping);
    }

    #[tokio::test]
    async fn a_program_whose_giver_ends_is_given_by_the_next_who_waits_for_it() {
        let programs = Arc::new(Programs::in_memory());
        let ((one, mut of_one), (other, _of_other)) = (Slow::new(b"abc"), Slow::new(b"abc"));
        let ((first, ends), (second, _connection)) = (one.connect(), other.connect());
        let program = executable(b"abc");
        other.may_give.add_permits(3);
        let begun = async {
            of_one.recv().await;
            let second = programs.keep(&program, Some(Giver::Process(second)));
            let ends = async { ends.close() };
            tokio::join!(second, ends).0
        };
        let (first, second) = tokio::join!(programs.keep(&program, Some(Giver::Process(first))), begun);
        assert!(first.is_err());
        second.unwrap();
        assert_eq!(read(&programs, &program.hash).unwrap(), b"abc");
    }

    #[test]
    fn a_folder_that_others_may_write_is_refused_and_so_is_a_name_that_is_no_hash() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("journal.programs");
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Programs::beside(&dir.path().join("journal")).is_err());
        for hash in ["pid-12", "", "../../../../etc/passwd", &"A".repeat(HASH)] {
            let program = Executable { hash: hash.to_owned(), ..Executable::default() };
            assert!(!Programs::can_keep(&program), "{hash}");
        }
    }
}
