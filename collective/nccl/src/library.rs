//! NCCL itself: found, and opened by its path.
//!
//! PyTorch's wheels bring it as `libnccl.so.2`, in a folder that no linker looks into, so it is opened by path. Calls and
//! constants are those of `nccl.h`, of NCCL 2.18 and later; see
//! <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html>.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclUniqueId};

use crate::error::{NcclError, Result};

/// Names the library.
const VARIABLE: &str = "WINGBEAT_NCCL";
const NAME: &str = "libnccl.so.2";
/// The least version: communicators that do not block are older, but broken.
const LEAST: c_int = 21800;

type Stream = *mut c_void;

/// The calls that are used, with enums as the numbers that they are: a newer NCCL may answer with new ones.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) -> $result:ty;)*) => {
        #[allow(non_snake_case, reason = "the names of nccl.h")]
        pub(crate) struct Functions {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// # Safety
            /// The library is NCCL, and is never closed.
            unsafe fn of(library: &libloading::Library) -> std::result::Result<Functions, libloading::Error> {
                // SAFETY: the caller's; these are the types of nccl.h.
                unsafe { Ok(Functions { $($name: *library.get(stringify!($name).as_bytes())?,)* }) }
            }
        }
    };
}

functions! {
    ncclGetVersion: fn(*mut c_int) -> c_int;
    ncclGetUniqueId: fn(*mut ncclUniqueId) -> c_int;
    ncclCommInitRankConfig: fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> c_int;
    ncclCommGetAsyncError: fn(ncclComm_t, *mut c_int) -> c_int;
    ncclCommFinalize: fn(ncclComm_t) -> c_int;
    ncclCommDestroy: fn(ncclComm_t) -> c_int;
    ncclCommAbort: fn(ncclComm_t) -> c_int;
    ncclGetErrorString: fn(c_int) -> *const c_char;
    ncclGetLastError: fn(ncclComm_t) -> *const c_char;
    ncclAllReduce: fn(*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, Stream) -> c_int;
    ncclReduce: fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, ncclComm_t, Stream) -> c_int;
    ncclBroadcast: fn(*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, Stream) -> c_int;
    ncclAllGather: fn(*const c_void, *mut c_void, usize, c_int, ncclComm_t, Stream) -> c_int;
    ncclReduceScatter: fn(*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, Stream) -> c_int;
    ncclSend: fn(*const c_void, usize, c_int, c_int, ncclComm_t, Stream) -> c_int;
    ncclRecv: fn(*mut c_void, usize, c_int, c_int, ncclComm_t, Stream) -> c_int;
    ncclGroupStart: fn() -> c_int;
    ncclGroupEnd: fn() -> c_int;
}

/// An NCCL that is loaded. It stays for as long as the process: it has threads of its own.
pub struct Library {
    pub(crate) functions: Functions,
    path: PathBuf,
    version: c_int,
}

impl Library {
    /// The NCCL of this process: what `WINGBEAT_NCCL` names, what the linker finds, or PyTorch's.
    ///
    /// # Errors
    /// There is none, or it is too old.
    pub fn get() -> Result<&'static Library> {
        static FOUND: OnceLock<Result<Library>> = OnceLock::new();
        FOUND.get_or_init(Self::find).as_ref().map_err(Clone::clone)
    }

    fn find() -> Result<Library> {
        if let Some(path) = std::env::var_os(VARIABLE) {
            return Self::open(Path::new(&path));
        }
        let roots = roots();
        let places: Vec<PathBuf> = std::iter::once(PathBuf::from(NAME)).chain(wheels(&roots)).collect();
        let mut unusable = None;
        for place in &places {
            match Self::open(place) {
                Ok(library) => return Ok(library),
                Err(error) if place.is_file() => unusable = unusable.or(Some(error)),
                Err(_) => {}
            }
        }
        let tried = std::iter::once("the linker's".into()).chain(roots.iter().map(|root| root.display().to_string()));
        Err(unusable.unwrap_or_else(|| NcclError::NotFound { tried: tried.collect() }))
    }

    /// Opens this library.
    ///
    /// # Errors
    /// It is not there, is no NCCL, or is too old.
    pub fn open(path: &Path) -> Result<Library> {
        let unusable = |why: String| NcclError::Unusable { path: path.display().to_string(), why };
        // SAFETY: loading NCCL runs its constructors, which only prepare its own state.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| unusable(error.to_string()))?;
        // SAFETY: it is never closed, and its names say that it is NCCL.
        let functions = unsafe { Functions::of(&library) }.map_err(|error| unusable(error.to_string()))?;
        std::mem::forget(library);
        let mut version = 0;
        // SAFETY: a number is written to where one may be.
        let code = unsafe { (functions.ncclGetVersion)(&raw mut version) };
        if code != 0 || version < LEAST {
            return Err(unusable(format!("it is version {}, and {} is needed", shown(version), shown(LEAST))));
        }
        Ok(Library { functions, path: path.to_owned(), version })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version, as `2.27.5`.
    pub fn version(&self) -> String {
        shown(self.version)
    }

    /// What a communicator is to begin with: it does not block.
    pub(crate) fn config(&self) -> ncclConfig_t {
        // `NCCL_CONFIG_INITIALIZER` of nccl.h 2.24; a newer NCCL takes it from its size and version.
        const UNDEFINED: c_int = c_int::MIN;
        ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: 0xcafe_beef,
            version: 22400,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
        }
    }

    /// What a code means, and what NCCL has written down of it.
    pub(crate) fn explained(&self, code: c_int, comm: ncclComm_t) -> String {
        // SAFETY: both give a text that lives on, or nothing; the second only reads.
        let (meaning, last) =
            unsafe { (text((self.functions.ncclGetErrorString)(code)), text((self.functions.ncclGetLastError)(comm))) };
        match last.is_empty() {
            true => meaning,
            false => format!("{meaning}: {last}"),
        }
    }
}

unsafe fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: the caller's: it is a text.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().trim().to_owned()
}

/// `NCCL_VERSION` of nccl.h, since 2.9.
fn shown(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// The folders of Python environments that this process may mean.
fn roots() -> Vec<PathBuf> {
    let of_python = |python: PathBuf| Some(python.parent()?.parent()?.to_owned());
    let mut roots: Vec<PathBuf> = Vec::new();
    roots.extend(std::env::var_os("WINGBEAT_PYTHON").map(PathBuf::from).and_then(of_python));
    roots.extend(std::env::var_os("VIRTUAL_ENV").map(PathBuf::from));
    roots.extend(std::env::var_os("CONDA_PREFIX").map(PathBuf::from));
    roots.push(PathBuf::from(".venv"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let pythons = std::env::split_paths(&path).map(|dir| dir.join("python3")).filter(|python| python.is_file());
    roots.extend(pythons.filter_map(of_python));
    roots.dedup();
    roots
}

/// Where the wheels `nvidia-nccl-cu*` have put it in these environments.
fn wheels(roots: &[PathBuf]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for root in roots {
        found.push(root.join("lib").join(NAME));
        let Ok(folders) = std::fs::read_dir(root.join("lib")) else { continue };
        let pythons = folders.flatten().filter(|folder| folder.file_name().to_string_lossy().starts_with("python3"));
        for python in pythons {
            for packages in ["site-packages", "dist-packages"] {
                found.push(python.path().join(packages).join("nvidia/nccl/lib").join(NAME));
            }
        }
    }
    found.retain(|path| path.is_file());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_of_a_wheel_is_found_in_its_environment() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("lib/python3.11/site-packages/nvidia/nccl/lib");
        std::fs::create_dir_all(&folder).unwrap();
        assert!(wheels(&[root.path().to_owned()]).is_empty());
        std::fs::write(folder.join(NAME), "no library").unwrap();
        assert_eq!(wheels(&[root.path().to_owned()]), [folder.join(NAME)]);
    }

    #[test]
    fn what_is_no_nccl_is_refused_with_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        std::fs::write(&path, "no library").unwrap();
        let Err(NcclError::Unusable { path: named, .. }) = Library::open(&path) else { panic!("it was opened") };
        assert_eq!(named, path.display().to_string());
        assert_eq!(shown(22_705), "2.27.5");
    }
}
