//! The C interface, called as C calls it.
mod common;

use balanceroute_native::*;
use common::{chunk, counted_token, last, payload, token};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::ptr::{null, null_mut};

const CHUNKED: u32 = 8;

fn stream(engine: i32, client: i32, kind: u32, flags: u32) -> BrStream {
    BrStream {
        engine,
        client,
        kind,
        flags,
        tokens: 1,
        high: 65_536,
        low: 16_384,
        reserved: 0,
        last_ns: sys::now_ns(),
        gap_max_ns: 0,
    }
}

fn returned() -> BrReturned {
    let nothing = || BrBytes { data: null(), len: 0 };
    BrReturned {
        slot: 99,
        reason: 99,
        error: 99,
        flags: 99,
        engine: nothing(),
        client: nothing(),
        ids: nothing(),
        new_ids: nothing(),
        behind: nothing(),
        texts: nothing(),
        last: nothing(),
    }
}

fn copied(bytes: &BrBytes) -> Vec<u8> {
    // SAFETY: nothing was released since it was returned.
    unsafe { std::slice::from_raw_parts(bytes.data, bytes.len) }.to_vec()
}

fn made(threads: u32, slots: u32) -> *mut BrPump {
    let bounds = [1_000u64, 1_000_000];
    let options = BrOptions { threads, slots, max_fd: 0, n_bounds: 2, bounds_ns: bounds.as_ptr() };
    let mut made = null_mut();
    // SAFETY: as the function wants it.
    assert_eq!(unsafe { br_pump_new(&options, &mut made) }, 0);
    made
}

#[test]
fn the_structs_are_as_python_has_them() {
    assert_eq!(br_abi(), 2);
    assert_eq!((size_of::<BrOptions>(), size_of::<BrStream>(), size_of::<BrParsed>()), (24, 48, 32));
    assert_eq!((size_of::<BrReturned>(), size_of::<slots::Slot>()), (128, 64));
    assert_eq!(
        (std::mem::offset_of!(slots::Slot, written), std::mem::offset_of!(slots::Slot, resumed_ns)),
        (24, 48)
    );
}

#[test]
fn what_is_wrong_is_refused() {
    let bounds = [5u64, 5];
    for (threads, slots, n_bounds, at) in [
        (0, 1, 0, null()),
        (65, 1, 0, null()),
        (1, 0, 0, null()),
        (1, (1 << 20) + 1, 0, null()),
        (1, 1, 2, null()),
        (1, 1, 65, bounds.as_ptr()),
        (1, 1, 2, bounds.as_ptr()),
    ] {
        let options = BrOptions { threads, slots, max_fd: 0, n_bounds, bounds_ns: at };
        let mut made = null_mut();
        // SAFETY: what is null is refused, and the bounds are there unless their number is.
        assert_eq!(unsafe { br_pump_new(&options, &mut made) }, -libc::EINVAL);
        assert!(made.is_null());
    }
    // SAFETY: null is refused everywhere.
    unsafe {
        assert_eq!(br_pump_new(null(), null_mut()), -libc::EINVAL);
        assert_eq!(br_add(null(), null()), -i64::from(libc::EINVAL));
        assert_eq!(br_pump_fd(null()), -libc::EINVAL);
        assert!(br_pump_slots(null()).is_null() && br_pump_gaps(null()).is_null());
        assert_eq!(br_stop(null(), 0, null_mut()), -libc::EINVAL);
        assert_eq!(br_take(null(), null_mut()), -libc::EINVAL);
        assert_eq!(br_release(null(), 0), -libc::EINVAL);
        assert_eq!(br_parser_feed(null_mut(), null(), 0, null_mut()), -libc::EINVAL);
        assert_eq!(br_parser_end(null_mut(), null_mut()), -libc::EINVAL);
        br_parser_free(null_mut());
        br_pump_free(null_mut());
        assert!(br_parser_new(null()).is_null());
        for (kind, flags) in [(3, 0), (0, 256), (1, 1), (1, 16), (1, 64), (2, 1), (2, 32), (2, 128)] {
            assert!(br_parser_new(&stream(0, 0, kind, flags)).is_null(), "{kind} {flags}");
        }
        assert!(br_parser_new(&BrStream { reserved: 1, ..stream(0, 0, 0, 0) }).is_null());
        assert!(br_parser_new(&BrStream { low: 70_000, ..stream(0, 0, 0, 0) }).is_null());
    }
}

#[test]
fn the_parser_is_fed_and_asked() {
    let all = [chunk(&counted_token("a", 3, "[7]")), chunk(&counted_token("b", 5, "[8,9]")), chunk(&last())]
        .concat();
    let flags = 1 | 2 | CHUNKED | 16 | 64;
    // SAFETY: as the functions want it; what they return is read before the next call.
    unsafe {
        let parser = br_parser_new(&stream(-1, -1, 0, flags));
        let nothing = BrBytes { data: null(), len: 0 };
        let mut parsed = BrParsed { reason: 0, events: 0, uncounted: 0, tokens: 0, client: nothing };
        let mut client = Vec::new();
        let mut events = 0;
        for piece in all.chunks(50) {
            assert_eq!(br_parser_feed(parser, piece.as_ptr(), piece.len(), &mut parsed), 0);
            events += parsed.events;
            client.extend(copied(&parsed.client));
        }
        assert_eq!((events, parsed.uncounted, parsed.tokens), (2, 0, 5));
        assert_eq!(payload(&client).0, [token("a"), token("b")].concat());
        let mut end = returned();
        assert_eq!(br_parser_end(parser, &mut end), 0);
        assert_eq!((copied(&end.ids), copied(&end.new_ids), end.flags), (b",7".to_vec(), b"8,9".to_vec(), 1));
        assert_eq!(copied(&end.texts)[..5], [1, 0, 0, 0, b'a']);
        assert!(copied(&end.last).ends_with(b"\n\n"));
        assert!(chunk(&last()).starts_with(&copied(&end.engine)) || copied(&end.engine) == chunk(&last()));
        br_parser_free(parser);
    }
}

#[test]
#[cfg_attr(miri, ignore)] // It knows no such threads.
fn a_stream_is_lent_stopped_and_released() {
    let (mut engine, of_engine) = UnixStream::pair().unwrap();
    let (mut client, of_client) = UnixStream::pair().unwrap();
    let pump = made(1, 2);
    // SAFETY: as the functions want it; what they return is read before it is released.
    unsafe {
        assert!(br_pump_fd(pump) >= 0);
        let lent = stream(of_engine.as_raw_fd(), of_client.as_raw_fd(), 0, 1 | 2 | CHUNKED | 16);
        let slot = u32::try_from(br_add(pump, &lent)).unwrap();
        engine.write_all(&chunk(&counted_token("a", 3, "[7]"))).unwrap();
        let mut found = vec![0; chunk(&token("a")).len()];
        client.read_exact(&mut found).unwrap();
        assert_eq!(found, chunk(&token("a")));
        let mut told = returned();
        assert_eq!(br_take(pump, &mut told), -libc::EAGAIN);
        assert_eq!(br_release(pump, slot), -libc::EINVAL);
        assert_eq!(br_stop(pump, slot, &mut told), 0);
        assert_eq!((told.slot, told.reason, told.error, told.flags), (slot, 7, 0, 0));
        assert_eq!(copied(&told.ids), b",7".to_vec());
        let counts = br_pump_slots(pump).add(slot as usize);
        assert_eq!((*counts).tokens.load(std::sync::atomic::Ordering::Relaxed), 3);
        assert_eq!(br_release(pump, slot), 0);
        assert_eq!(br_stop(pump, slot, &mut told), -libc::EINVAL);
        assert_eq!(br_add(pump, &stream(-1, -1, 0, 0)), -i64::from(libc::EBADF));
        assert!(br_add(pump, &lent) >= 0); // It is freed with the pump.
        br_pump_free(pump);
    }
}
