//! The operations of a group of devices.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DevicePtr, DevicePtrMut};
use cudarc::nccl::sys::{ncclComm_t, ncclUniqueId};
use parking_lot::Mutex;
use wingbeat_collective::{Call, Group, Op};

use crate::communicator::{Communicator, is_failure};
use crate::element::{DeviceElement, number_of, type_of};
use crate::error::{NcclError, Result};
use crate::library::{Functions, Library};

/// How a group meets, and how its operations are called.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// How long members may take to meet, and NCCL to take an operation up; a minute.
    pub limit: Duration,
    /// Whether members check, before each operation, that all call the same: NCCL itself hangs or mixes data up if they do
    /// not. It costs a meeting in shared memory, or a round trip between machines. True.
    pub checks: bool,
}

impl Settings {
    /// Another limit.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Settings {
        self.limit = limit;
        self
    }

    /// Without the check before each operation.
    #[must_use]
    pub fn unchecked(mut self) -> Settings {
        self.checks = false;
        self
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings { limit: Duration::from_secs(60), checks: true }
    }
}

/// The device of this number, of those that the process sees.
///
/// # Errors
/// There is no CUDA here, or no such device.
pub fn device(number: usize) -> Result<Arc<CudaContext>> {
    const WHAT: &str = "opening a device";
    // SAFETY: it opens libcuda, whose constructors only prepare its own state.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(NcclError::Cuda { what: WHAT.to_owned(), why: "there is no libcuda.so.1 on this node".into() });
    }
    CudaContext::new(number).map_err(|error| NcclError::cuda(WHAT, error))
}

/// The communicator and the stream of a call.
type Where = (ncclComm_t, *mut c_void);

/// A member's view of a group whose data is on devices. Operations run on its stream, in the order in which they are
/// called, and return before they are done: [`DeviceGroup::wait`] waits for them, and so does all other work on the
/// stream.
///
/// A member that dies ends the operations of the others within seconds, with an error: their streams go on, and what they
/// were to get is of no use. After an error the group is of no use.
///
/// ```no_run
/// # use wingbeat_collective::{MeetingHandle, Op};
/// # use wingbeat_nccl::{DeviceGroup, NcclError, device};
/// fn average(meeting: &MeetingHandle, rank: u32, gradients: &[f32]) -> Result<Vec<f32>, NcclError> {
///     let stream = device(0)?.default_stream();
///     let group = wingbeat_collective::Group::join(meeting, rank)?;
///     let mut group = DeviceGroup::join(group, stream.clone())?;
///     let mut data = stream.clone_htod(gradients)?;
///     group.all_reduce(&mut data, Op::Avg)?;
///     group.wait()?;
///     Ok(stream.clone_dtoh(&data)?)
/// }
/// ```
pub struct DeviceGroup {
    // Before the group: whoever is left sees this member gone only when it has nothing on the device any more.
    communicator: Communicator,
    group: Group,
    stream: Arc<CudaStream>,
    /// The end of what was called last.
    last: Arc<Mutex<Option<CudaEvent>>>,
    checks: bool,
}

impl DeviceGroup {
    /// Joins the other members of a group, each with a stream of its own device; every member does, once.
    ///
    /// # Errors
    /// NCCL is not there, two members have one device, a member is gone, or they have not met in a minute.
    pub fn join(group: Group, stream: Arc<CudaStream>) -> Result<DeviceGroup> {
        Self::join_with(group, stream, Settings::default())
    }

    /// As [`DeviceGroup::join`], with settings. All members have the same.
    ///
    /// # Errors
    /// As [`DeviceGroup::join`].
    pub fn join_with(mut group: Group, stream: Arc<CudaStream>, settings: Settings) -> Result<DeviceGroup> {
        let context = stream.context();
        context.bind_to_thread()?;
        differs(&mut group, &context.uuid()?.bytes)?;
        let (library, id) = named(&mut group)?;
        let last: Arc<Mutex<Option<CudaEvent>>> = Arc::default();
        let looked_at = last.clone();
        let is_idle = move || match &*looked_at.lock() {
            Some(event) => event.try_is_complete().map_err(|error| NcclError::cuda("an operation", error)),
            None => Ok(true),
        };
        let place = (group.rank(), group.size());
        let peers = group.peers()?;
        let communicator = Communicator::join(library, id, place, peers, settings.limit, Box::new(is_idle))?;
        Ok(DeviceGroup { communicator, group, stream, last, checks: settings.checks })
    }

    /// This member's rank.
    pub fn rank(&self) -> u32 {
        self.group.rank()
    }

    /// The number of members.
    pub fn size(&self) -> u32 {
        self.group.size()
    }

    /// The stream that operations run on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The same members, for data that is not on devices.
    pub fn host(&mut self) -> &mut Group {
        &mut self.group
    }

    /// Waits until all that was called is done.
    ///
    /// # Errors
    /// An operation has failed, or a member is gone.
    pub fn wait(&mut self) -> Result<()> {
        self.communicator.wait()
    }

    /// As [`Group::all_reduce`].
    ///
    /// # Errors
    /// A member is gone or calls something else, or NCCL fails.
    pub fn all_reduce<T: DeviceElement>(&mut self, data: &mut impl DevicePtrMut<T>, op: Op) -> Result<()> {
        let count = data.len();
        self.check::<T>(Call::AllReduce(op), count)?;
        // SAFETY: it writes as much as there is.
        unsafe {
            self.in_place("all_reduce", data, |nccl, data, (comm, stream)| {
                (nccl.ncclAllReduce)(data, data, count, type_of::<T>(), number_of(op), comm, stream)
            })
        }
    }

    /// As [`Group::reduce`].
    ///
    /// # Errors
    /// A member is gone or calls something else, there is no such root, or NCCL fails.
    pub fn reduce<T: DeviceElement>(&mut self, data: &mut impl DevicePtrMut<T>, op: Op, root: u32) -> Result<()> {
        let count = data.len();
        self.check::<T>(Call::Reduce(op, root), count)?;
        // SAFETY: it writes as much as there is.
        unsafe {
            self.in_place("reduce", data, |nccl, data, (comm, stream)| {
                (nccl.ncclReduce)(data, data, count, type_of::<T>(), number_of(op), root as c_int, comm, stream)
            })
        }
    }

    /// As [`Group::broadcast`].
    ///
    /// # Errors
    /// A member is gone or calls something else, there is no such root, or NCCL fails.
    pub fn broadcast<T: DeviceElement>(&mut self, data: &mut impl DevicePtrMut<T>, root: u32) -> Result<()> {
        let count = data.len();
        self.check::<T>(Call::Broadcast(root), count)?;
        // SAFETY: it writes as much as there is.
        unsafe {
            self.in_place("broadcast", data, |nccl, data, (comm, stream)| {
                (nccl.ncclBroadcast)(data, data, count, type_of::<T>(), root as c_int, comm, stream)
            })
        }
    }

    /// As [`Group::all_gather`].
    ///
    /// # Errors
    /// A member is gone or calls something else, `all` is of another length, or NCCL fails.
    pub fn all_gather<T: DeviceElement>(
        &mut self,
        mine: &impl DevicePtr<T>,
        all: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        let count = mine.len();
        self.group.is_whole("all", all.len(), count)?;
        self.check::<T>(Call::AllGather, count)?;
        // SAFETY: `all` is as long as all parts.
        unsafe {
            self.between("all_gather", mine, all, |nccl, (mine, all), (comm, stream)| {
                (nccl.ncclAllGather)(mine, all, count, type_of::<T>(), comm, stream)
            })
        }
    }

    /// As [`Group::reduce_scatter`].
    ///
    /// # Errors
    /// A member is gone or calls something else, `all` is of another length, or NCCL fails.
    pub fn reduce_scatter<T: DeviceElement>(
        &mut self,
        all: &impl DevicePtr<T>,
        mine: &mut impl DevicePtrMut<T>,
        op: Op,
    ) -> Result<()> {
        let count = mine.len();
        self.group.is_whole("all", all.len(), count)?;
        self.check::<T>(Call::ReduceScatter(op), count)?;
        // SAFETY: `all` is as long as all parts.
        unsafe {
            self.between("reduce_scatter", all, mine, |nccl, (all, mine), (comm, stream)| {
                (nccl.ncclReduceScatter)(all, mine, count, type_of::<T>(), number_of(op), comm, stream)
            })
        }
    }

    /// As [`Group::all_to_all`].
    ///
    /// # Errors
    /// A member is gone or calls something else, a length is not a multiple of the number of members, or NCCL fails.
    pub fn all_to_all<T: DeviceElement>(
        &mut self,
        out: &impl DevicePtr<T>,
        into: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        let members = self.size() as usize;
        let each = out.len() / members;
        self.group.is_whole("out", out.len(), each)?;
        self.group.is_whole("into", into.len(), each)?;
        self.check::<T>(Call::AllToAll, each)?;
        let part = |member: usize| member * each * size_of::<T>();
        // SAFETY: both have a part for each member.
        unsafe {
            self.between("all_to_all", out, into, |nccl, (out, into), (comm, stream)| {
                let mut codes = vec![(nccl.ncclGroupStart)()];
                for member in 0..members {
                    let (out, into) = (out.byte_add(part(member)), into.byte_add(part(member)));
                    codes.push((nccl.ncclSend)(out, each, type_of::<T>(), member as c_int, comm, stream));
                    codes.push((nccl.ncclRecv)(into, each, type_of::<T>(), member as c_int, comm, stream));
                }
                let ended = (nccl.ncclGroupEnd)();
                // What is still going on within the group is no failure.
                codes.into_iter().find(|code| is_failure(*code)).unwrap_or(ended)
            })
        }
    }

    /// As [`Group::send`].
    ///
    /// # Errors
    /// That member is gone or calls something else, there is no such member, or NCCL fails.
    pub fn send<T: DeviceElement>(&mut self, data: &impl DevicePtr<T>, to: u32) -> Result<()> {
        let count = data.len();
        self.check::<T>(Call::Send(to), count)?;
        let stream = self.stream.clone();
        let (data, _read) = data.device_ptr(&stream);
        // SAFETY: it reads as much as there is.
        unsafe {
            self.run("send", |nccl, (comm, stream)| {
                (nccl.ncclSend)(data as *const c_void, count, type_of::<T>(), to as c_int, comm, stream)
            })
        }
    }

    /// As [`Group::recv`].
    ///
    /// # Errors
    /// That member is gone or calls something else, there is no such member, or NCCL fails.
    pub fn recv<T: DeviceElement>(&mut self, data: &mut impl DevicePtrMut<T>, from: u32) -> Result<()> {
        let count = data.len();
        self.check::<T>(Call::Recv(from), count)?;
        // SAFETY: it writes as much as there is.
        unsafe {
            self.in_place("recv", data, |nccl, data, (comm, stream)| {
                (nccl.ncclRecv)(data, count, type_of::<T>(), from as c_int, comm, stream)
            })
        }
    }

    /// Calls NCCL with where data is.
    ///
    /// # Safety
    /// NCCL is told how long it is.
    unsafe fn in_place<T>(
        &mut self,
        what: &'static str,
        data: &mut impl DevicePtrMut<T>,
        call: impl FnOnce(&Functions, *mut c_void, Where) -> c_int,
    ) -> Result<()> {
        let stream = self.stream.clone();
        let (data, _written) = data.device_ptr_mut(&stream);
        // SAFETY: the caller's; the stream orders who uses it.
        unsafe { self.run(what, |nccl, place| call(nccl, data as *mut c_void, place)) }
    }

    /// Calls NCCL with where data is, and where it goes.
    ///
    /// # Safety
    /// As `in_place`.
    unsafe fn between<T>(
        &mut self,
        what: &'static str,
        from: &impl DevicePtr<T>,
        to: &mut impl DevicePtrMut<T>,
        call: impl FnOnce(&Functions, (*const c_void, *mut c_void), Where) -> c_int,
    ) -> Result<()> {
        let stream = self.stream.clone();
        let ((from, _read), (to, _written)) = (from.device_ptr(&stream), to.device_ptr_mut(&stream));
        // SAFETY: the caller's; the stream orders who uses it.
        unsafe { self.run(what, |nccl, place| call(nccl, (from as *const c_void, to as *mut c_void), place)) }
    }

    fn check<T: DeviceElement>(&mut self, call: Call, count: usize) -> Result<()> {
        match self.checks {
            true => Ok(self.group.agree::<T>(call, count)?),
            false => Ok(()),
        }
    }

    /// Calls NCCL, and notes where the operation ends on the stream.
    ///
    /// # Safety
    /// As [`Communicator::call`].
    unsafe fn run(&mut self, what: &'static str, call: impl FnOnce(&Functions, Where) -> c_int) -> Result<()> {
        self.stream.context().bind_to_thread()?;
        let stream = self.stream.cu_stream().cast();
        // SAFETY: the caller's.
        unsafe { self.communicator.call(what, |nccl, comm| call(nccl, (comm, stream))) }?;
        let event = self.stream.record_event(None)?;
        *self.last.lock() = Some(event);
        Ok(())
    }
}

/// That no two members have one device, unless that is meant.
fn differs(group: &mut Group, own: &[std::ffi::c_char; 16]) -> Result<()> {
    let own = own.map(|byte| byte as u8);
    let mut all = vec![0; own.len() * group.size() as usize];
    group.all_gather(&own, &mut all)?;
    if std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| value != "0") {
        return Ok(());
    }
    match shared(&all.chunks(own.len()).collect::<Vec<_>>()) {
        Some((first, second)) => Err(NcclError::SameDevice { first, second }),
        None => Ok(()),
    }
}

/// The first two members that have the same.
fn shared(devices: &[&[u8]]) -> Option<(u32, u32)> {
    let second = (1..devices.len()).find(|second| devices[..*second].contains(&devices[*second]))?;
    let first = devices.iter().position(|device| *device == devices[second])?;
    Some((first as u32, second as u32))
}

/// The name that rank 0 gives the group, once NCCL is at every member.
fn named(group: &mut Group) -> Result<(&'static Library, ncclUniqueId)> {
    let found = Library::get().and_then(|library| {
        let id = if group.rank() == 0 { Some(Communicator::name(library)?) } else { None };
        Ok((library, id))
    });
    // A member without it is an error at all at once, and not after a minute.
    let mut lacks = vec![0u8; group.size() as usize];
    group.all_gather(&[u8::from(found.is_err())], &mut lacks)?;
    let (library, id) = found?;
    if let Some(rank) = lacks.iter().position(|lacks| *lacks != 0) {
        return Err(NcclError::Failed {
            what: "joining".into(),
            why: format!("rank {rank} has no NCCL that it can use"),
        });
    }
    let mut bytes = id.map_or([0; 128], |id| id.internal.map(|byte| byte as u8));
    group.broadcast(&mut bytes, 0)?;
    Ok((library, ncclUniqueId { internal: bytes.map(|byte| byte as std::ffi::c_char) }))
}

impl From<cudarc::driver::DriverError> for NcclError {
    fn from(error: cudarc::driver::DriverError) -> Self {
        NcclError::cuda("an operation", error)
    }
}

#[cfg(test)]
mod tests {
    use super::shared;

    #[test]
    fn two_members_with_one_device_are_named() {
        assert_eq!(shared(&[b"a", b"b", b"a"]), Some((0, 2)));
        assert_eq!(shared(&[b"a", b"b"]), None);
    }
}
