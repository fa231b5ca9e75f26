//! The system calls that the standard library has no safe form of.
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

pub const READABLE: u32 = libc::EPOLLIN as u32;
/// Told once each time that the socket can take data again.
pub const WRITABLE_ONCE: u32 = (libc::EPOLLOUT | libc::EPOLLET) as u32;
pub const FAILED: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;

pub type Event = libc::epoll_event;

pub fn no_event() -> Event {
    Event { events: 0, u64: 0 }
}

fn checked(result: i32) -> io::Result<i32> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// What a thread waits for.
pub struct Epoll(OwnedFd);

impl Epoll {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers; the descriptor is new, and nobody else's.
        unsafe {
            let made = checked(libc::epoll_create1(libc::EPOLL_CLOEXEC))?;
            Ok(Self(OwnedFd::from_raw_fd(made)))
        }
    }

    pub fn add(&self, what: &impl AsRawFd, events: u32, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, what.as_raw_fd(), events, token)
    }

    /// To be called before a copied descriptor is closed: while another copy is open, the entry stays.
    pub fn remove(&self, what: &impl AsRawFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, what.as_raw_fd(), 0, 0)
    }

    fn control(&self, what: i32, descriptor: RawFd, events: u32, token: u64) -> io::Result<()> {
        let mut event = Event { events, u64: token };
        // SAFETY: the event lives until the call returns.
        let done = unsafe { libc::epoll_ctl(self.0.as_raw_fd(), what, descriptor, &mut event) };
        checked(done).map(drop)
    }

    /// Waits for events; returns how many there are, none if a signal came.
    pub fn wait(&self, events: &mut [Event]) -> io::Result<usize> {
        let most = i32::try_from(events.len()).unwrap_or(i32::MAX);
        // SAFETY: the kernel writes at most that many events into the slice.
        let found = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), most, -1) };
        match checked(found) {
            Ok(count) => Ok(count as usize),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(error) => Err(error),
        }
    }
}

/// A descriptor that is readable once it has been rung.
pub struct Bell(File);

impl Bell {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers; the descriptor is new, and nobody else's.
        unsafe {
            let made = checked(libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC))?;
            Ok(Self(File::from_raw_fd(made)))
        }
    }

    pub fn ring(&self) {
        // It fails only if it has been rung 2^64 times and nobody read it: it is readable then.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }

    pub fn silence(&self) {
        let _ = (&self.0).read(&mut [0; 8]);
    }
}

impl AsRawFd for Bell {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Copies a descriptor of somebody else; `below`: what the copy's number must be less than, 0 for any.
pub fn copy(descriptor: RawFd, below: u32) -> io::Result<OwnedFd> {
    if descriptor < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: it is borrowed for this call alone; a number that is no descriptor is an error of it.
    let made = unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned()?;
    if below > 0 && made.as_raw_fd() as u32 >= below {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok(made)
}

/// Leaves all signals to the threads that were there before.
pub fn block_signals() {
    // SAFETY: the set is written by the first call, and read by the second.
    unsafe {
        let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
    }
}

/// The monotonic clock, in nanoseconds.
pub fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the struct lives until the call returns.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    (time.tv_sec as u64) * 1_000_000_000 + time.tv_nsec as u64
}
