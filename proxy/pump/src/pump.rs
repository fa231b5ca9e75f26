//! The threads that move streams, and the slots that these have while they are here.
//!
//! A slot's lock is held while something happens to its stream: one read, or one write, neither of which
//! waits. So whoever stops a stream waits for that at most, and for no thread.
#![forbid(unsafe_code)]

use crate::kept::{TokenIds, Transcript};
use crate::parser::{Parser, Reason, Scratch};
use crate::slots::{Gaps, Slot, BACK};
use crate::stream::{Bounds, Ending, Place, Stream};
use crate::sys::{self, Bell, Epoll, Event};
use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

const BELL: u64 = u64::MAX;
const EVENTS: usize = 512;
const READ_BYTES: usize = 65_536;
/// So many streams at most have something to send before it is sent: a write wakes its reader, who may take
/// the processor from the others.
const MOST_WAITING: usize = 32;
/// Events that come closer to each other are gathered for so long.
const DENSE_NS: u64 = 1_000_000;
pub const MOST_SLOTS: u32 = 1 << 20;
const STACK_BYTES: usize = 256 << 10;

pub struct Options {
    pub threads: usize,
    pub slots: usize,
    pub bounds_ns: Vec<u64>,
}

/// What comes back of a stream.
pub struct Returned {
    pub slot: u32,
    pub reason: Option<Reason>,
    pub error: i32,
    pub engine: Vec<u8>,
    pub client: Vec<u8>,
    pub ids: TokenIds,
    pub transcript: Transcript,
}

enum Held {
    Nothing,
    Live(Box<Stream>),
    /// It came back; Python may have seen that or not.
    Back {
        returned: Box<Returned>,
        seen: bool,
    },
}

struct Seat {
    generation: u32,
    thread: usize,
    held: Held,
}

struct Thread {
    epoll: Epoll,
    bell: Bell,
    streams: AtomicUsize,
    failed: AtomicBool,
}

struct Shared {
    options: Options,
    slots: Vec<Slot>,
    seats: Vec<Mutex<Seat>>,
    free: Mutex<Vec<u32>>,
    back: Mutex<VecDeque<u32>>,
    tell: Bell,
    gaps: Vec<AtomicU64>,
    threads: Vec<Thread>,
    ends: AtomicBool,
}

pub struct Pump {
    shared: Arc<Shared>,
    running: Vec<JoinHandle<()>>,
}

/// A panic leaves a stream behind that is marked as busy; the lock itself protects nothing else.
fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

fn system(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

impl Pump {
    pub fn new(options: Options) -> io::Result<Self> {
        let threads = (0..options.threads)
            .map(|_| {
                let thread = Thread {
                    epoll: Epoll::new()?,
                    bell: Bell::new()?,
                    streams: AtomicUsize::new(0),
                    failed: AtomicBool::new(false),
                };
                thread.epoll.add(&thread.bell, sys::READABLE, BELL)?;
                Ok(thread)
            })
            .collect::<io::Result<Vec<_>>>()?;
        let seat = || Mutex::new(Seat { generation: 0, thread: 0, held: Held::Nothing });
        let shared = Arc::new(Shared {
            slots: (0..options.slots).map(|_| Slot::default()).collect(),
            seats: (0..options.slots).map(|_| seat()).collect(),
            free: Mutex::new((0..options.slots as u32).rev().collect()),
            back: Mutex::default(),
            tell: Bell::new()?,
            gaps: (0..options.threads * (options.bounds_ns.len() + 2)).map(|_| AtomicU64::new(0)).collect(),
            threads,
            ends: AtomicBool::new(false),
            options,
        });
        let mut made = Self { shared, running: Vec::new() };
        for number in 0..made.shared.threads.len() {
            let shared = made.shared.clone();
            let thread = std::thread::Builder::new().name(format!("pump-{number}")).stack_size(STACK_BYTES);
            made.running.push(thread.spawn(move || shared.run(number))?);
        }
        Ok(made)
    }

    /// Readable while something may have come back.
    pub fn tell(&self) -> &Bell {
        &self.shared.tell
    }

    pub fn slots(&self) -> &[Slot] {
        &self.shared.slots
    }

    /// Row by row, those of each thread.
    pub fn gaps(&self) -> &[AtomicU64] {
        &self.shared.gaps
    }

    /// Takes a stream over; returns its slot.
    pub fn add(
        &self,
        engine: TcpStream,
        client: TcpStream,
        parser: Parser,
        bounds: Bounds,
        last_ns: u64,
        gap_max_ns: u64,
    ) -> io::Result<u32> {
        let shared = &*self.shared;
        engine.set_nonblocking(true)?;
        client.set_nonblocking(true)?;
        let usable = shared.threads.iter().enumerate().filter(|(_, one)| !one.failed.load(Acquire));
        let (number, thread) =
            usable.min_by_key(|(_, one)| one.streams.load(Relaxed)).ok_or_else(|| system(libc::EIO))?;
        let slot = lock(&shared.free).pop().ok_or_else(|| system(libc::EMFILE))?;
        let mut seat = lock(&shared.seats[slot as usize]);
        seat.generation = seat.generation.wrapping_add(1);
        seat.thread = number;
        shared.slots[slot as usize].begin(parser.tokens(), last_ns, gap_max_ns, seat.generation);
        let stream = Box::new(Stream::new(engine, client, parser, bounds, last_ns));
        if let Err(error) = stream.begin(&shared.place(slot, &seat)) {
            drop(seat);
            lock(&shared.free).push(slot);
            return Err(error);
        }
        thread.streams.fetch_add(1, Relaxed);
        seat.held = Held::Live(stream);
        drop(seat);
        if thread.failed.load(Acquire) {
            shared.give_all_back(number); // It failed meanwhile.
        }
        Ok(slot)
    }

    /// Takes a stream back, and has `read` see what comes of it.
    pub fn stop<T>(&self, slot: u32, read: impl FnOnce(&Returned) -> T) -> io::Result<T> {
        let mut seat = self.seat(slot)?;
        self.shared.end(slot, &mut seat, (Reason::Stopped, 0));
        match &mut seat.held {
            Held::Back { returned, seen } => {
                *seen = true;
                Ok(read(returned))
            }
            _ => Err(system(libc::EINVAL)),
        }
    }

    /// Has `read` see the next stream that came back by itself.
    pub fn take<T>(&self, read: impl FnOnce(&Returned) -> T) -> io::Result<T> {
        loop {
            let slot = lock(&self.shared.back).pop_front().ok_or_else(|| system(libc::EAGAIN))?;
            let mut seat = self.seat(slot)?;
            if let Held::Back { returned, seen: seen @ false } = &mut seat.held {
                *seen = true;
                return Ok(read(returned));
            }
        }
    }

    /// Frees the slot of a stream that was taken back.
    pub fn release(&self, slot: u32) -> io::Result<()> {
        let mut seat = self.seat(slot)?;
        if !matches!(seat.held, Held::Back { seen: true, .. }) {
            return Err(system(libc::EINVAL));
        }
        seat.held = Held::Nothing;
        drop(seat);
        lock(&self.shared.free).push(slot);
        Ok(())
    }

    fn seat(&self, slot: u32) -> io::Result<MutexGuard<'_, Seat>> {
        self.shared.seats.get(slot as usize).map(lock).ok_or_else(|| system(libc::EINVAL))
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.shared.ends.store(true, Release);
        for thread in &self.shared.threads {
            thread.bell.ring();
        }
        for running in self.running.drain(..) {
            let _ = running.join();
        }
    }
}

/// A stream by its slot, and by which of those that have had the slot it is.
type Name = (u32, u32);

/// What a thread works with.
struct Desk {
    buffer: Vec<u8>,
    scratch: Scratch,
    /// Those that have something to send.
    waiting: Vec<Name>,
    now_ns: u64,
    reads: usize,
    dense: usize,
    returned: bool,
}

impl Shared {
    fn place(&self, slot: u32, seat: &Seat) -> Place<'_> {
        Place {
            epoll: &self.threads[seat.thread].epoll,
            token: u64::from(seat.generation) << 32 | u64::from(slot) << 1,
            slot: &self.slots[slot as usize],
        }
    }

    /// Takes a stream out, if it is still here, with all that is to go back.
    fn end(&self, slot: u32, seat: &mut Seat, (reason, error): Ending) -> bool {
        if !matches!(seat.held, Held::Live(_)) {
            return false;
        }
        let Held::Live(mut stream) = std::mem::replace(&mut seat.held, Held::Nothing) else {
            return false;
        };
        stream.leave(&self.place(slot, seat));
        let returned = Box::new(Returned {
            slot,
            reason: Some(reason),
            error,
            engine: stream.parser.held().to_vec(),
            client: stream.unsent().to_vec(),
            ids: stream.parser.ids.take(),
            transcript: stream.parser.transcript.take(),
        });
        seat.held = Held::Back { returned, seen: false };
        self.slots[slot as usize].flags.fetch_or(BACK, Relaxed);
        self.threads[seat.thread].streams.fetch_sub(1, Relaxed);
        true
    }

    fn run(&self, number: usize) {
        sys::block_signals();
        let ran = catch_unwind(AssertUnwindSafe(|| self.turn_for_ever(number)));
        if !matches!(ran, Ok(Ok(()))) {
            self.threads[number].failed.store(true, Release);
            self.give_all_back(number);
        }
    }

    /// Gives back all streams of a thread that failed. Of one that it was busy with something may be lost.
    fn give_all_back(&self, number: usize) {
        for slot in 0..self.slots.len() as u32 {
            let mut seat = lock(&self.seats[slot as usize]);
            let Held::Live(stream) = &seat.held else { continue };
            if seat.thread == number {
                let error = if stream.busy { libc::EIO } else { 0 };
                self.end(slot, &mut seat, (Reason::Fault, error));
                drop(seat);
                lock(&self.back).push_back(slot);
            }
        }
        self.tell.ring();
    }

    fn turn_for_ever(&self, number: usize) -> io::Result<()> {
        let thread = &self.threads[number];
        let row = self.options.bounds_ns.len() + 2;
        let gaps = Gaps::new(&self.options.bounds_ns, &self.gaps[number * row..(number + 1) * row]);
        let mut events = vec![sys::no_event(); EVENTS];
        let mut desk = Desk {
            buffer: vec![0; READ_BYTES],
            scratch: Scratch::default(),
            waiting: Vec::with_capacity(MOST_WAITING),
            now_ns: 0,
            reads: 0,
            dense: 0,
            returned: false,
        };
        while !self.ends.load(Acquire) {
            let found = thread.epoll.wait(&mut events)?;
            desk.now_ns = sys::now_ns();
            (desk.reads, desk.dense, desk.returned) = (0, 0, false);
            for event in &events[..found] {
                self.handle(*event, thread, &gaps, &mut desk);
                if desk.waiting.len() >= MOST_WAITING {
                    self.send_all(&mut desk);
                }
            }
            self.send_all(&mut desk);
            if desk.returned {
                self.tell.ring();
            }
            if desk.dense * 2 > desk.reads {
                let spent_ns = sys::now_ns().saturating_sub(desk.now_ns);
                std::thread::sleep(Duration::from_nanos(DENSE_NS.saturating_sub(spent_ns)));
            }
        }
        Ok(())
    }

    fn handle(&self, event: Event, thread: &Thread, gaps: &Gaps<'_>, desk: &mut Desk) {
        let (token, what) = (event.u64, event.events);
        if token == BELL {
            thread.bell.silence();
            return;
        }
        let name = ((token as u32) >> 1, (token >> 32) as u32);
        if token & 1 == 1 {
            desk.waiting.push(name); // Its client takes data again, or has gone.
            return;
        }
        desk.reads += 1;
        let Desk { buffer, scratch, waiting, now_ns, dense, .. } = desk;
        let given_back = self.with(name, |stream, place| {
            if what & sys::FAILED != 0 {
                return Err((Reason::Engine, 0)); // Python meets the error.
            }
            let before = stream.unsent().len();
            let read = stream.read(*now_ns, place.slot, gaps, buffer, scratch);
            if let Ok(Some(gap_ns)) = read {
                *dense += usize::from(gap_ns < DENSE_NS);
            }
            if read.is_err() {
                stream.send(*now_ns, place)?;
            } else if stream.unsent().len() > before {
                waiting.push(name);
            }
            read.map(drop)
        });
        desk.returned |= given_back;
    }

    fn send_all(&self, desk: &mut Desk) {
        let now_ns = desk.now_ns;
        for name in desk.waiting.drain(..) {
            desk.returned |= self.with(name, |stream, place| stream.send(now_ns, place));
        }
    }

    /// Does something to a stream, if it is still here; returns whether it was given back.
    fn with(
        &self,
        (slot, generation): Name,
        what: impl FnOnce(&mut Stream, &Place<'_>) -> Result<(), Ending>,
    ) -> bool {
        let Some(seat) = self.seats.get(slot as usize) else { return false };
        let mut seat = lock(seat);
        if seat.generation != generation {
            return false;
        }
        let place = self.place(slot, &seat);
        let Held::Live(stream) = &mut seat.held else { return false };
        stream.busy = true;
        let done = what(stream, &place);
        stream.busy = false;
        let Err(ending) = done else { return false };
        self.end(slot, &mut seat, ending);
        drop(seat);
        lock(&self.back).push_back(slot);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parser::{Kind, Settings};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_a_thread_was_busy_with_when_it_failed_is_told_to_be_broken() {
        let made = Pump::new(Options { threads: 1, slots: 2, bounds_ns: vec![] }).unwrap();
        let mut peers = Vec::new();
        let slots = [(); 2].map(|()| {
            let mut end = || {
                let (here, there) = UnixStream::pair().unwrap();
                peers.push(there);
                TcpStream::from(OwnedFd::from(here))
            };
            let bounds = Bounds { high: 9, low: 3 };
            made.add(end(), end(), Parser::new(Settings::plain(Kind::Named), 0), bounds, 0, 0).unwrap()
        });
        let shared = &made.shared;
        let name = (slots[1], lock(&shared.seats[slots[1] as usize]).generation);
        let failed = catch_unwind(AssertUnwindSafe(|| shared.with(name, |_, _| panic!("as a bug would"))));
        assert!(failed.is_err());
        shared.give_all_back(0);
        let told = |one: &Returned| (one.slot, one.reason, one.error);
        assert_eq!(made.take(told).unwrap(), (slots[0], Some(Reason::Fault), 0));
        assert_eq!(made.take(told).unwrap(), (slots[1], Some(Reason::Fault), libc::EIO));
    }
}
