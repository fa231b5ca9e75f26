//! The ordinary middle of BalanceRoute's streams, moved without Python; and large requests, read without it.
//!
//! Python hands a stream over while nothing but token events is expected of it, and gets it back at anything
//! else, with the bytes that were not taken. This file is the C interface; each struct has the layout that
//! `ctypes` gives it. No function waits for a peer or calls back, and all may be called from any thread.
use parser::{Kind, Parser, Scratch, Settings};
use pump::{Options, Pump, Returned};
use scan::{Names, Scan};
use slots::Slot;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr;
use std::sync::atomic::AtomicU64;

mod counts;
pub mod kept;
mod marks;
pub mod parser;
pub mod pump;
pub mod scan;
pub mod slots;
pub mod stream;
pub mod sys;

const ABI: u32 = 2;
const MOST_THREADS: u32 = 64;
const MOST_BOUNDS: u32 = 64;

const COUNTED: u32 = 1;
const HIDE: u32 = 2;
const NO_USAGE: u32 = 4;
const CHUNKED: u32 = 8;
const IDS: u32 = 16;
const COMPLETION: u32 = 32;
const TEXT: u32 = 64;
const IDS_WAIT: u32 = 128;

/// In `BrReturned.flags`: there is something behind the last text that counts.
const NEW: u32 = 1;

#[repr(C)]
pub struct BrOptions {
    pub threads: u32,
    pub slots: u32,
    pub max_fd: u32,
    pub n_bounds: u32,
    pub bounds_ns: *const u64,
}

#[repr(C)]
pub struct BrStream {
    pub engine: RawFd,
    pub client: RawFd,
    pub kind: u32,
    pub flags: u32,
    pub tokens: u32,
    pub high: u32,
    pub low: u32,
    pub reserved: u32,
    pub last_ns: u64,
    pub gap_max_ns: u64,
}

#[repr(C)]
pub struct BrBytes {
    pub data: *const u8,
    pub len: usize,
}

#[repr(C)]
pub struct BrReturned {
    pub slot: u32,
    pub reason: u32,
    pub error: i32,
    pub flags: u32,
    pub engine: BrBytes,
    pub client: BrBytes,
    pub ids: BrBytes,
    pub new_ids: BrBytes,
    pub behind: BrBytes,
    pub texts: BrBytes,
    pub last: BrBytes,
}

#[repr(C)]
pub struct BrParsed {
    pub reason: u32,
    pub events: u32,
    pub uncounted: u32,
    pub tokens: u32,
    pub client: BrBytes,
}

pub struct BrPump {
    pump: Pump,
    max_fd: u32,
}

pub struct BrParser {
    parser: Parser,
    scratch: Scratch,
    out: Vec<u8>,
    returned: Option<Box<Returned>>,
}

impl BrBytes {
    fn of(bytes: &[u8]) -> Self {
        Self { data: bytes.as_ptr(), len: bytes.len() }
    }

    /// SAFETY: what it tells of is readable for as long, and nobody changes it.
    unsafe fn bytes<'a>(&self) -> io::Result<&'a [u8]> {
        if self.data.is_null() {
            return Err(invalid());
        }
        Ok(unsafe { std::slice::from_raw_parts(self.data, self.len) })
    }
}

impl BrReturned {
    fn of(one: &Returned) -> Self {
        Self {
            slot: one.slot,
            reason: one.reason.map_or(0, |reason| reason as u32),
            error: one.error,
            flags: if one.ids.has_new { NEW } else { 0 },
            engine: BrBytes::of(&one.engine),
            client: BrBytes::of(&one.client),
            ids: BrBytes::of(&one.ids.kept),
            new_ids: BrBytes::of(&one.ids.new),
            behind: BrBytes::of(&one.ids.behind),
            texts: BrBytes::of(&one.transcript.pieces),
            last: BrBytes::of(&one.transcript.last),
        }
    }
}

fn invalid() -> io::Error {
    io::Error::from_raw_os_error(libc::EINVAL)
}

/// Runs what C called: a panic must not get there.
fn guarded(call: impl FnOnce() -> io::Result<i64>) -> i64 {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => -i64::from(error.raw_os_error().unwrap_or(libc::EIO)),
        Err(_) => -i64::from(libc::EIO),
    }
}

fn status(call: impl FnOnce() -> io::Result<()>) -> i32 {
    guarded(|| call().map(|()| 0)) as i32
}

/// SAFETY: `pointer` is null or points to a `T` that nobody changes meanwhile.
unsafe fn borrowed<'a, T>(pointer: *const T) -> io::Result<&'a T> {
    unsafe { pointer.as_ref() }.ok_or_else(invalid)
}

/// SAFETY: `pointer` is null or points to room for a `T`.
unsafe fn write<T>(pointer: *mut T, value: T) -> io::Result<()> {
    if pointer.is_null() {
        return Err(invalid());
    }
    unsafe { pointer.write(value) };
    Ok(())
}

fn parser_of(stream: &BrStream) -> io::Result<Parser> {
    let kind = match stream.kind {
        0 => Kind::Completion,
        1 => Kind::Named,
        2 => Kind::Generate,
        _ => return Err(invalid()),
    };
    let has = |flag: u32| stream.flags & flag != 0;
    let known = COUNTED | HIDE | NO_USAGE | CHUNKED | IDS | COMPLETION | TEXT | IDS_WAIT;
    let of_completions = COUNTED | HIDE | NO_USAGE | COMPLETION | IDS_WAIT;
    let misplaced = match kind {
        Kind::Completion => 0,
        Kind::Generate => of_completions,
        Kind::Named => of_completions | IDS | TEXT,
    };
    if stream.reserved != 0 || has(!known | misplaced) || stream.low > stream.high {
        return Err(invalid());
    }
    let form = if has(COMPLETION) { kept::Form::Completion } else { kept::Form::Chat };
    let settings = Settings {
        kind,
        counted: has(COUNTED),
        hide: has(HIDE),
        no_usage: has(NO_USAGE),
        chunked: has(CHUNKED),
        ids: has(IDS).then_some(form),
        ids_wait: has(IDS_WAIT),
        text: has(TEXT),
    };
    Ok(Parser::new(settings, stream.tokens))
}

#[no_mangle]
pub extern "C" fn br_abi() -> u32 {
    ABI
}

/// # Safety
/// `options` is readable, its bounds too; `made` is writable.
#[no_mangle]
pub unsafe extern "C" fn br_pump_new(options: *const BrOptions, made: *mut *mut BrPump) -> i32 {
    status(|| {
        let options = unsafe { borrowed(options) }?;
        let count = options.n_bounds;
        let in_bounds = (1..=MOST_THREADS).contains(&options.threads)
            && (1..=pump::MOST_SLOTS).contains(&options.slots)
            && count <= MOST_BOUNDS
            && (count == 0 || !options.bounds_ns.is_null());
        if !in_bounds {
            return Err(invalid());
        }
        let bounds_ns = match count {
            0 => Vec::new(),
            // SAFETY: the caller says that they are there.
            _ => unsafe { std::slice::from_raw_parts(options.bounds_ns, count as usize) }.to_vec(),
        };
        if !bounds_ns.is_sorted_by(|one, next| one < next) {
            return Err(invalid());
        }
        let pump = Pump::new(Options {
            threads: options.threads as usize,
            slots: options.slots as usize,
            bounds_ns,
        })?;
        let pump = Box::into_raw(Box::new(BrPump { pump, max_fd: options.max_fd }));
        unsafe { write(made, pump) }
    })
}

/// # Safety
/// `pump` is of `br_pump_new`, and is not used any more; nor is what points into it.
#[no_mangle]
pub unsafe extern "C" fn br_pump_free(pump: *mut BrPump) {
    status(|| {
        if !pump.is_null() {
            // SAFETY: it was made by `Box::into_raw`, and is freed once.
            drop(unsafe { Box::from_raw(pump) });
        }
        Ok(())
    });
}

/// # Safety
/// `pump` is of `br_pump_new`, as everywhere below.
#[no_mangle]
pub unsafe extern "C" fn br_pump_fd(pump: *const BrPump) -> i32 {
    guarded(|| Ok(i64::from(unsafe { borrowed(pump) }?.pump.tell().as_raw_fd()))) as i32
}

/// # Safety
/// See `br_pump_fd`.
#[no_mangle]
pub unsafe extern "C" fn br_pump_slots(pump: *const BrPump) -> *const Slot {
    unsafe { pump.as_ref() }.map_or(ptr::null(), |one| one.pump.slots().as_ptr())
}

/// # Safety
/// See `br_pump_fd`.
#[no_mangle]
pub unsafe extern "C" fn br_pump_gaps(pump: *const BrPump) -> *const AtomicU64 {
    unsafe { pump.as_ref() }.map_or(ptr::null(), |one| one.pump.gaps().as_ptr())
}

/// # Safety
/// `stream` is readable.
#[no_mangle]
pub unsafe extern "C" fn br_add(pump: *const BrPump, stream: *const BrStream) -> i64 {
    guarded(|| {
        let (pump, stream) = unsafe { (borrowed(pump)?, borrowed(stream)?) };
        let parser = parser_of(stream)?;
        let engine = TcpStream::from(sys::copy(stream.engine, pump.max_fd)?);
        let client = TcpStream::from(sys::copy(stream.client, pump.max_fd)?);
        let bounds = stream::Bounds { high: stream.high, low: stream.low };
        pump.pump.add(engine, client, parser, bounds, stream.last_ns, stream.gap_max_ns).map(i64::from)
    })
}

/// # Safety
/// `returned` is writable.
#[no_mangle]
pub unsafe extern "C" fn br_stop(pump: *const BrPump, slot: u32, returned: *mut BrReturned) -> i32 {
    status(|| {
        let told = unsafe { borrowed(pump) }?.pump.stop(slot, BrReturned::of)?;
        unsafe { write(returned, told) }
    })
}

/// # Safety
/// `returned` is writable.
#[no_mangle]
pub unsafe extern "C" fn br_take(pump: *const BrPump, returned: *mut BrReturned) -> i32 {
    status(|| {
        let told = unsafe { borrowed(pump) }?.pump.take(BrReturned::of)?;
        unsafe { write(returned, told) }
    })
}

/// # Safety
/// Nothing that was returned for the slot is used any more.
#[no_mangle]
pub unsafe extern "C" fn br_release(pump: *const BrPump, slot: u32) -> i32 {
    status(|| unsafe { borrowed(pump) }?.pump.release(slot))
}

/// # Safety
/// `stream` is readable.
#[no_mangle]
pub unsafe extern "C" fn br_parser_new(stream: *const BrStream) -> *mut BrParser {
    let mut made = ptr::null_mut();
    status(|| {
        let parser = parser_of(unsafe { borrowed(stream) }?)?;
        let (scratch, out) = (Scratch::default(), Vec::new());
        made = Box::into_raw(Box::new(BrParser { parser, scratch, out, returned: None }));
        Ok(())
    });
    made
}

/// # Safety
/// `parser` is of `br_parser_new`, and used by one thread at a time; `length` bytes of `data` are readable.
#[no_mangle]
pub unsafe extern "C" fn br_parser_feed(
    parser: *mut BrParser,
    data: *const u8,
    length: usize,
    parsed: *mut BrParsed,
) -> i32 {
    status(|| {
        let one = unsafe { parser.as_mut() }.ok_or_else(invalid)?;
        if data.is_null() {
            return Err(invalid());
        }
        // SAFETY: the caller says that they are there.
        let data = unsafe { std::slice::from_raw_parts(data, length) };
        one.out.clear();
        let fed = one.parser.feed(data, &mut one.scratch, &mut one.out);
        let told = BrParsed {
            reason: fed.reason.map_or(0, |reason| reason as u32),
            events: fed.events,
            uncounted: fed.uncounted,
            tokens: one.parser.tokens(),
            client: BrBytes::of(&one.out),
        };
        unsafe { write(parsed, told) }
    })
}

/// # Safety
/// See `br_parser_feed`; `returned` is writable.
#[no_mangle]
pub unsafe extern "C" fn br_parser_end(parser: *mut BrParser, returned: *mut BrReturned) -> i32 {
    status(|| {
        let one = unsafe { parser.as_mut() }.ok_or_else(invalid)?;
        let told = Returned {
            slot: 0,
            reason: Some(parser::Reason::Stopped),
            error: 0,
            engine: one.parser.held().to_vec(),
            client: Vec::new(),
            ids: one.parser.ids.take(),
            transcript: one.parser.transcript.take(),
        };
        let told = BrReturned::of(one.returned.insert(Box::new(told)));
        unsafe { write(returned, told) }
    })
}

/// # Safety
/// `parser` is of `br_parser_new`, and is not used any more.
#[no_mangle]
pub unsafe extern "C" fn br_parser_free(parser: *mut BrParser) {
    status(|| {
        if !parser.is_null() {
            // SAFETY: it was made by `Box::into_raw`, and is freed once.
            drop(unsafe { Box::from_raw(parser) });
        }
        Ok(())
    });
}

/// # Safety
/// `scan` is the caller's, and nobody else's meanwhile; `length` bytes of `data` are readable, and so are the
/// names that it has.
#[no_mangle]
pub unsafe extern "C" fn br_scan(scan: *mut Scan, data: *const u8, length: usize, work: usize) -> i32 {
    guarded(|| {
        let scan = unsafe { scan.as_mut() }.ok_or_else(invalid)?;
        let (prompts, data_members) = unsafe { (scan.prompts.bytes()?, scan.data_members.bytes()?) };
        let data = unsafe { BrBytes { data, len: length }.bytes() }?;
        Ok(scan::advance(scan, Names { prompts, data_members }, data, work) as i64)
    }) as i32
}
