//! From a thread's registers and stack to the functions that it is in: the frames by [`framehop`], which reads the tables that panics
//! use, and their names by [`addr2line`], which reads the symbols and debugging information of the program's own file.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use addr2line::Loader;
#[cfg(target_arch = "aarch64")]
use framehop::aarch64::{CacheAarch64 as Cache, UnwindRegsAarch64 as Registers, UnwinderAarch64 as Unwinds};
#[cfg(target_arch = "x86_64")]
use framehop::x86_64::{CacheX86_64 as Cache, UnwindRegsX86_64 as Registers, UnwinderX86_64 as Unwinds};
use framehop::{ExplicitModuleSectionInfo, FrameAddress, Module, Unwinder};
use wingbeat_net::messages::StackFrame;

use super::sample::Sample;

/// Frames that are followed: recursion may be deep.
const DEPTH: usize = 200;
/// Bytes of a table that is read: those of the largest programs have some ten megabytes.
const TABLE: u64 = 256 << 20;

/// A file that is mapped into this process: the program, or a library.
struct Object {
    /// Where it was loaded: this is added to the addresses in the file.
    bias: u64,
    range: Range<u64>,
    loader: Loader,
}

/// What is loaded into this process.
pub(super) struct Program {
    /// By where they begin.
    objects: BTreeMap<u64, Object>,
    unwinder: Unwinds<Vec<u8>>,
}

impl Program {
    pub(super) fn open() -> Program {
        let mut program = Program { objects: BTreeMap::new(), unwinder: Unwinds::new() };
        let Ok(memory) = File::open("/proc/self/mem") else { return program };
        for (path, bias, range) in loaded() {
            // What the kernel brings along has no file.
            let Ok(loader) = Loader::new(&path) else { continue };
            program.unwinder.add_module(module(&path, bias, &range, &loader, &memory));
            program.objects.insert(range.start, Object { bias, range, loader });
        }
        program
    }

    /// The functions that a thread was in, innermost first.
    pub(super) fn frames_of(&self, sample: &Sample) -> Vec<StackFrame> {
        #[cfg(target_arch = "x86_64")]
        let registers = Registers::new(sample.pc, sample.sp, sample.fp);
        #[cfg(target_arch = "aarch64")]
        let registers = Registers::new(sample.lr, sample.sp, sample.fp);
        let mut cache = Cache::new();
        let mut read = |address: u64| {
            let at = address.checked_sub(sample.sp).and_then(|at| usize::try_from(at).ok()).ok_or(())?;
            let word = sample.stack.get(at..at.checked_add(8).ok_or(())?).ok_or(())?;
            word.try_into().map(u64::from_ne_bytes).map_err(|_| ())
        };
        let mut frames = Vec::new();
        let mut walk = self.unwinder.iter_frames(sample.pc, registers, &mut cache, &mut read);
        for _ in 0..DEPTH {
            match walk.next() {
                Ok(Some(frame)) => self.name(frame, &mut frames),
                Ok(None) | Err(_) => break,
            }
        }
        frames
    }

    /// One address may be in several functions, of which the outermost is the one that was compiled.
    fn name(&self, frame: FrameAddress, into: &mut Vec<StackFrame>) {
        let address = frame.address_for_lookup();
        let unknown = || StackFrame { function: format!("{address:#x}"), place: None };
        let object = self.objects.range(..=address).next_back().map(|(_, object)| object);
        let Some(object) = object.filter(|object| object.range.contains(&address)) else { return into.push(unknown()) };
        let at = address.wrapping_sub(object.bias);
        let before = into.len();
        if let Ok(mut frames) = object.loader.find_frames(at) {
            while let Ok(Some(frame)) = frames.next() {
                let Some(function) = frame.function.as_ref().and_then(|name| Some(name.demangle().ok()?.into_owned()))
                else {
                    continue;
                };
                let place = frame.location.and_then(|place| Some(format!("{}:{}", end_of(place.file?), place.line?)));
                into.push(StackFrame { function, place });
            }
        }
        if into.len() == before {
            let symbol = object.loader.find_symbol(at);
            let name = symbol.map(|symbol| addr2line::demangle_auto(symbol.into(), None).into_owned());
            into.push(name.map_or_else(unknown, |function| StackFrame { function, place: None }));
        }
    }
}

/// The last two parts of a path say enough.
fn end_of(path: &str) -> String {
    let mut parts: Vec<&str> = path.rsplit('/').take(2).collect();
    parts.reverse();
    parts.join("/")
}

/// What [`framehop`] needs of a file: its tables, as they lie in memory.
fn module(path: &str, bias: u64, range: &Range<u64>, loader: &Loader, memory: &File) -> Module<Vec<u8>> {
    let section = |name: &[u8]| loader.get_section_range(name).map(|range| range.begin..range.end);
    let bytes_of = |section: &Option<Range<u64>>| {
        let section = section.as_ref().filter(|section| section.end - section.start <= TABLE)?;
        let mut bytes = vec![0; usize::try_from(section.end - section.start).ok()?];
        memory.read_exact_at(&mut bytes, section.start.wrapping_add(bias)).ok()?;
        Some(bytes)
    };
    let (eh_frame, eh_frame_hdr) = (section(b".eh_frame"), section(b".eh_frame_hdr"));
    let sections = ExplicitModuleSectionInfo {
        base_svma: 0,
        text_svma: section(b".text"),
        got_svma: section(b".got"),
        eh_frame: bytes_of(&eh_frame),
        eh_frame_svma: eh_frame,
        eh_frame_hdr: bytes_of(&eh_frame_hdr),
        eh_frame_hdr_svma: eh_frame_hdr,
        ..ExplicitModuleSectionInfo::default()
    };
    Module::new(path.to_owned(), range.clone(), bias, sections)
}

/// The files that are loaded: path, where, and the addresses that they have.
fn loaded() -> Vec<(String, u64, Range<u64>)> {
    extern "C" fn note(info: *mut libc::dl_phdr_info, _: usize, into: *mut c_void) -> c_int {
        // SAFETY: the loader gives a description that is whole, and what was passed to `dl_iterate_phdr`.
        unsafe {
            let (info, into) = (&*info, &mut *into.cast::<Vec<(String, u64, Range<u64>)>>());
            let headers = match info.dlpi_phdr.is_null() {
                true => &[][..],
                false => std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)),
            };
            let segments = headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
            let ends = segments.map(|header| (header.p_vaddr, header.p_vaddr + header.p_memsz));
            let all = ends.reduce(|(start, end), (other, far)| (start.min(other), end.max(far)));
            let name = match info.dlpi_name.is_null() {
                true => String::new(),
                false => CStr::from_ptr(info.dlpi_name).to_string_lossy().into_owned(),
            };
            // The program itself has none, and may have been replaced at its path.
            let path = if name.is_empty() { "/proc/self/exe".to_owned() } else { name };
            if let Some((start, end)) = all {
                let bias = info.dlpi_addr;
                into.push((path, bias, bias.wrapping_add(start)..bias.wrapping_add(end)));
            }
        }
        0
    }
    let mut all: Vec<(String, u64, Range<u64>)> = Vec::new();
    // SAFETY: the callback uses the pointer as what it is, while it lives.
    unsafe { libc::dl_iterate_phdr(Some(note), std::ptr::from_mut(&mut all).cast()) };
    all
}
