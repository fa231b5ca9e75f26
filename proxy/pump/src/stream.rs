//! One stream: from an engine's socket, by way of the parser, to a client's.
#![forbid(unsafe_code)]

use crate::parser::{Fed, Parser, Reason, Scratch};
use crate::slots::{Gaps, Slot, PAUSED};
use crate::sys::{self, Epoll};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering::Relaxed;

/// Of a buffer that is empty no more is kept.
const KEPT_ROOM: usize = 8192;

/// What waits for the client bounds what is read of the engine.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// With more than this the engine is not read,
    pub high: u32,
    /// until it is no more than this.
    pub low: u32,
}

/// Where a stream's events stand in an epoll: its engine's at this token, its client's at the next.
pub struct Place<'a> {
    pub epoll: &'a Epoll,
    pub token: u64,
    pub slot: &'a Slot,
}

pub struct Stream {
    engine: TcpStream,
    client: TcpStream,
    pub parser: Parser,
    bounds: Bounds,
    unsent: Vec<u8>,
    sent: usize,
    last_ns: u64,
    paused: bool,
    client_watched: bool,
    /// Whether something happens to it right now.
    pub busy: bool,
}

/// Why a stream ends here, with the system's error if there was one.
pub type Ending = (Reason, i32);

impl Stream {
    pub fn new(engine: TcpStream, client: TcpStream, parser: Parser, bounds: Bounds, last_ns: u64) -> Self {
        Self {
            engine,
            client,
            parser,
            bounds,
            unsent: Vec::new(),
            sent: 0,
            last_ns,
            paused: false,
            client_watched: false,
            busy: false,
        }
    }

    /// What was taken and has not been sent.
    pub fn unsent(&self) -> &[u8] {
        &self.unsent[self.sent..]
    }

    pub fn begin(&self, place: &Place<'_>) -> io::Result<()> {
        place.epoll.add(&self.engine, sys::READABLE, place.token)
    }

    /// Has epoll forget both sockets. The copies may be closed then.
    pub fn leave(&self, place: &Place<'_>) {
        // It cannot fail but for what is not there.
        if !self.paused {
            let _ = place.epoll.remove(&self.engine);
        }
        if self.client_watched {
            let _ = place.epoll.remove(&self.client);
        }
    }

    /// Reads what the engine has written. Returns the seconds since events came last, in nanoseconds, if any came.
    pub fn read(
        &mut self,
        now_ns: u64,
        slot: &Slot,
        gaps: &Gaps,
        buffer: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<Option<u64>, Ending> {
        let size = match self.engine.read(buffer) {
            Ok(0) => return Err((Reason::End, 0)),
            Ok(size) => size,
            Err(error) if is_transient(&error) => return Ok(None),
            Err(error) => return Err(ending(Reason::Engine, &error)),
        };
        let before = self.unsent.len();
        let fed = self.parser.feed(&buffer[..size], scratch, &mut self.unsent);
        let gap_ns = (fed.events > 0).then(|| self.count(now_ns, fed, slot, gaps));
        slot.written.fetch_add((self.unsent.len() - before) as u64, Relaxed);
        fed.reason.map_or(Ok(gap_ns), |reason| Err((reason, 0)))
    }

    fn count(&mut self, now_ns: u64, fed: Fed, slot: &Slot, gaps: &Gaps) -> u64 {
        let gap_ns = now_ns.saturating_sub(self.last_ns);
        self.last_ns = now_ns;
        slot.tokens.store(self.parser.tokens(), Relaxed);
        slot.events.fetch_add(fed.events, Relaxed);
        slot.uncounted.fetch_add(fed.uncounted, Relaxed);
        slot.last_ns.store(now_ns, Relaxed);
        slot.gap_max_ns.fetch_max(gap_ns, Relaxed);
        gaps.observe(gap_ns);
        gap_ns
    }

    /// Sends what waits, as far as the client's socket takes it, and reads the engine or does not, accordingly.
    pub fn send(&mut self, now_ns: u64, place: &Place<'_>) -> Result<(), Ending> {
        let sent = self.write(now_ns, place.slot);
        let waiting = self.unsent().len();
        place.slot.waiting.store(waiting as u32, Relaxed);
        sent?;
        let system = |error: io::Error| ending(Reason::Fault, &error);
        if waiting > 0 && !self.client_watched {
            place.epoll.add(&self.client, sys::WRITABLE_ONCE, place.token + 1).map_err(system)?;
            self.client_watched = true;
        }
        if !self.paused && waiting > self.bounds.high as usize {
            place.epoll.remove(&self.engine).map_err(system)?;
            self.paused = true;
            place.slot.flags.fetch_or(PAUSED, Relaxed);
        } else if self.paused && waiting <= self.bounds.low as usize {
            self.begin(place).map_err(system)?;
            self.paused = false;
            // The client's pause was none of the engine's.
            self.last_ns = now_ns;
            place.slot.last_ns.store(now_ns, Relaxed);
            place.slot.resumed_ns.store(now_ns, Relaxed);
            place.slot.flags.fetch_and(!PAUSED, Relaxed);
        }
        Ok(())
    }

    fn write(&mut self, now_ns: u64, slot: &Slot) -> Result<(), Ending> {
        while self.sent < self.unsent.len() {
            match self.client.write(&self.unsent[self.sent..]) {
                Ok(size) => {
                    self.sent += size;
                    slot.drained_ns.store(now_ns, Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // What is sent is not kept.
                    self.unsent.drain(..self.sent);
                    self.sent = 0;
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(ending(Reason::Client, &error)),
            }
        }
        self.unsent.clear();
        self.unsent.shrink_to(KEPT_ROOM);
        self.sent = 0;
        Ok(())
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn ending(reason: Reason, error: &io::Error) -> Ending {
    (reason, error.raw_os_error().unwrap_or(libc::EIO))
}
