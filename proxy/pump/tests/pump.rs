//! The threads, over socket pairs: streams that go and come back, clients that do not read, and peers that leave.
mod common;

use balanceroute_native::parser::{Parser, Reason, Settings};
use balanceroute_native::pump::{Options, Pump, Returned};
use balanceroute_native::slots::{BACK, PAUSED};
use balanceroute_native::stream::Bounds;
use balanceroute_native::sys;
use common::{chunk, counted_token, last, payload, token, Draw, PLAIN, WITH_IDS};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

const BOUNDS: Bounds = Bounds { high: 65_536, low: 16_384 };
const PATIENCE: Duration = Duration::from_secs(60);

fn pump(threads: usize, slots: usize) -> Pump {
    Pump::new(Options { threads, slots, bounds_ns: vec![1_000_000, 1_000_000_000] }).unwrap()
}

/// Both ends of a stream: the engine's, and the client's.
struct Ends {
    engine: UnixStream,
    client: UnixStream,
    // What Python has, and the pump has copies of.
    of_engine: UnixStream,
    of_client: UnixStream,
}

impl Ends {
    fn new() -> Self {
        let (engine, of_engine) = UnixStream::pair().unwrap();
        let (client, of_client) = UnixStream::pair().unwrap();
        of_engine.set_nonblocking(true).unwrap();
        of_client.set_nonblocking(true).unwrap();
        Self { engine, client, of_engine, of_client }
    }

    fn lend(&self, pump: &Pump, settings: Settings) -> u32 {
        let copy = |one: &UnixStream| TcpStream::from(sys::copy(one.as_raw_fd(), 0).unwrap());
        let parser = Parser::new(settings, 0);
        pump.add(copy(&self.of_engine), copy(&self.of_client), parser, BOUNDS, sys::now_ns(), 0).unwrap()
    }

    fn receive(&mut self, size: usize) -> Vec<u8> {
        let mut found = vec![0; size];
        self.client.set_read_timeout(Some(PATIENCE)).unwrap();
        self.client.read_exact(&mut found).unwrap();
        found
    }
}

struct Back {
    slot: u32,
    reason: Option<Reason>,
    error: i32,
    engine: Vec<u8>,
    client: Vec<u8>,
    ids: Vec<u8>,
}

fn copied(one: &Returned) -> Back {
    Back {
        slot: one.slot,
        reason: one.reason,
        error: one.error,
        engine: one.engine.clone(),
        client: one.client.clone(),
        ids: one.ids.kept.clone(),
    }
}

fn until(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "{what} does not come");
        yield_now();
    }
}

fn take(pump: &Pump) -> Back {
    let begun = Instant::now();
    loop {
        if let Ok(back) = pump.take(copied) {
            return back;
        }
        assert!(begun.elapsed() < PATIENCE, "no stream comes back");
        sleep(Duration::from_micros(200));
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn a_stream_passes_and_comes_back_at_its_end() {
    let (pump, mut ends) = (pump(1, 4), Ends::new());
    let slot = ends.lend(&pump, PLAIN);
    ends.engine.write_all(&chunk(&token("a"))).unwrap();
    assert_eq!(ends.receive(chunk(&token("a")).len()), chunk(&token("a")));
    let end = [chunk(&last()), b"0\r\n\r\n".to_vec()].concat();
    ends.engine.write_all(&[chunk(&token("b")), end.clone()].concat()).unwrap();
    let back = take(&pump);
    assert_eq!((back.slot, back.reason, back.error), (slot, Some(Reason::Event), 0));
    assert_eq!((back.engine, back.client), (end, vec![]));
    assert_eq!(ends.receive(chunk(&token("b")).len()), chunk(&token("b")));
    let one = &pump.slots()[slot as usize];
    assert_eq!((one.tokens.load(Relaxed), one.events.load(Relaxed)), (2, 2));
    assert_eq!(one.written.load(Relaxed), 2 * chunk(&token("a")).len() as u64);
    assert_eq!(one.flags.load(Relaxed), BACK);
    let gaps: Vec<u64> = pump.gaps().iter().map(|one| one.load(Relaxed)).collect();
    assert_eq!(gaps[..3].iter().sum::<u64>(), 2);
    assert!(gaps[3] >= one.gap_max_ns.load(Relaxed));
    pump.release(slot).unwrap();
    assert!(pump.release(slot).is_err());
    assert!(pump.take(copied).is_err());
}

#[test]
fn a_stream_that_is_stopped_comes_with_all_that_was_not_passed_on() {
    let (pump, mut ends) = (pump(1, 4), Ends::new());
    let slot = ends.lend(&pump, PLAIN);
    let half = &chunk(&token("b"))[..20];
    ends.engine.write_all(&[&chunk(&token("a"))[..], half].concat()).unwrap();
    ends.receive(chunk(&token("a")).len());
    let back = pump.stop(slot, copied).unwrap();
    assert_eq!((back.reason, back.engine, back.client), (Some(Reason::Stopped), half.to_vec(), vec![]));
    // Nobody reads it any more.
    ends.engine.write_all(&chunk(&token("c"))).unwrap();
    let mut left = [0; 4];
    sleep(Duration::from_millis(5));
    assert_eq!((&ends.of_engine).read(&mut left).unwrap(), 4);
    pump.release(slot).unwrap();
    assert!(pump.stop(slot, copied).is_err());
    assert!(pump.stop(99, copied).is_err());
}

#[test]
fn an_engine_waits_for_a_client_that_does_not_read() {
    let (pump, mut ends) = (pump(1, 4), Ends::new());
    let slot = ends.lend(&pump, PLAIN);
    let piece = chunk(&token(&"x".repeat(1_000)));
    let all = piece.repeat(3_000);
    let (mut engine, sent) = (ends.engine.try_clone().unwrap(), all.clone());
    let writer = std::thread::spawn(move || engine.write_all(&sent).unwrap());
    let one = &pump.slots()[slot as usize];
    until("the pause", || one.flags.load(Relaxed) & PAUSED != 0);
    let waiting = one.waiting.load(Relaxed) as usize;
    assert!(waiting > BOUNDS.high as usize);
    assert!(waiting < BOUNDS.high as usize + 2 * 65_536 + 5_000, "{waiting}");
    let paused_ns = one.last_ns.load(Relaxed);
    assert_eq!(one.resumed_ns.load(Relaxed), 0);
    let mut found = Vec::new();
    let mut buffer = vec![0; 100_000];
    while payload(&found).0.len() < payload(&all).0.len() {
        ends.client.set_read_timeout(Some(PATIENCE)).unwrap();
        let size = ends.client.read(&mut buffer).unwrap();
        assert!(size > 0);
        found.extend_from_slice(&buffer[..size]);
    }
    writer.join().unwrap();
    assert_eq!(payload(&found).0, payload(&all).0);
    until("the end of the pause", || one.flags.load(Relaxed) & PAUSED == 0);
    assert!(one.resumed_ns.load(Relaxed) > paused_ns);
    assert_eq!((one.waiting.load(Relaxed), one.events.load(Relaxed)), (0, 3_000));
    assert_eq!(one.written.load(Relaxed), found.len() as u64);
}

#[test]
fn nothing_is_lost_of_a_stream_whose_client_does_not_read() {
    for stops in [true, false] {
        let (pump, ends) = (pump(1, 4), Ends::new());
        let slot = ends.lend(&pump, PLAIN);
        let all = [chunk(&token(&"x".repeat(1_000))).repeat(3_000), chunk(&last())].concat();
        let (mut engine, sent) = (ends.engine.try_clone().unwrap(), all.clone());
        let writer = std::thread::spawn(move || engine.write_all(&sent).unwrap());
        let one = &pump.slots()[slot as usize];
        until("the pause", || one.flags.load(Relaxed) & PAUSED != 0);
        let mut found = Vec::new();
        let mut client = ends.client.try_clone().unwrap();
        if !stops {
            // So much that it goes on for a while, and comes to its end while something waits for the client.
            let mut buffer = vec![0; 2_000];
            while pump.slots()[slot as usize].flags.load(Relaxed) & BACK == 0 {
                client.set_nonblocking(true).unwrap();
                match client.read(&mut buffer) {
                    Ok(size) => found.extend_from_slice(&buffer[..size]),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
            }
            client.set_nonblocking(false).unwrap();
        }
        let back = pump.stop(slot, copied).unwrap();
        assert_eq!(back.reason, Some(if stops { Reason::Stopped } else { Reason::Event }));
        drop(ends.of_client); // The pump's copy is closed, so the client sees the end of what was sent.
        client.read_to_end(&mut found).unwrap();
        found.extend_from_slice(&back.client);
        let mut rest = back.engine;
        ends.of_engine.set_nonblocking(false).unwrap();
        let mut of_engine = ends.of_engine;
        drop(ends.engine);
        let reader = std::thread::spawn(move || {
            of_engine.read_to_end(&mut rest).unwrap();
            rest
        });
        writer.join().unwrap();
        let rest = reader.join().unwrap();
        assert_eq!([payload(&found).0, payload(&rest).0].concat(), payload(&all).0);
    }
}

#[test]
fn a_client_that_leaves_gives_its_stream_back() {
    let (pump, mut ends) = (pump(1, 4), Ends::new());
    let slot = ends.lend(&pump, PLAIN);
    drop(ends.client);
    ends.engine.write_all(&chunk(&token("a"))).unwrap();
    let back = take(&pump);
    assert_eq!((back.slot, back.reason, back.error), (slot, Some(Reason::Client), libc::EPIPE));
    assert_eq!(back.client, chunk(&token("a")));
}

#[test]
fn a_client_that_leaves_while_it_is_waited_for_gives_its_stream_back() {
    let (pump, ends) = (pump(1, 4), Ends::new());
    let slot = ends.lend(&pump, PLAIN);
    let mut engine = ends.engine.try_clone().unwrap();
    let writer =
        std::thread::spawn(move || engine.write_all(&chunk(&token(&"x".repeat(1_000))).repeat(3_000)));
    let one = &pump.slots()[slot as usize];
    until("the pause", || one.flags.load(Relaxed) & PAUSED != 0);
    drop(ends.client);
    assert_eq!(take(&pump).reason, Some(Reason::Client));
    drop(ends.of_engine);
    assert!(writer.join().unwrap().is_err());
}

#[test]
fn an_engine_that_leaves_gives_its_stream_back() {
    let (pump, mut ends) = (pump(1, 4), Ends::new());
    ends.lend(&pump, PLAIN);
    ends.engine.write_all(b"9f\r\nda").unwrap();
    drop(ends.engine);
    let back = take(&pump);
    // A pair that is closed on one side has failed for epoll: it is left to who reads it next.
    let mut rest = back.engine;
    assert!(matches!(back.reason, Some(Reason::End | Reason::Engine)));
    ends.of_engine.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"9f\r\nda");
}

#[test]
fn an_engine_that_ends_its_side_is_at_its_end() {
    let (pump, mut ends) = (pump(1, 4), Ends::new());
    ends.lend(&pump, PLAIN);
    ends.engine.write_all(&chunk(&token("a"))).unwrap();
    ends.engine.shutdown(std::net::Shutdown::Write).unwrap();
    let back = take(&pump);
    assert_eq!((back.reason, back.engine), (Some(Reason::End), vec![]));
    assert_eq!(ends.receive(chunk(&token("a")).len()), chunk(&token("a")));
}

#[test]
fn ids_come_back_with_the_stream() {
    let (pump, mut ends) = (pump(1, 4), Ends::new());
    let slot = ends.lend(&pump, WITH_IDS);
    let cut = chunk(&token("a"));
    for count in [1, 2] {
        let event = counted_token("a", count, &format!("[{}]", 6 + count));
        ends.engine.write_all(&chunk(&event)).unwrap();
        assert_eq!(ends.receive(cut.len()), cut);
    }
    assert_eq!(pump.slots()[slot as usize].tokens.load(Relaxed), 2);
    ends.engine.write_all(&chunk(&last())).unwrap();
    let back = take(&pump);
    assert_eq!(back.ids, b",7,8");
}

#[test]
fn a_stream_is_told_once_whoever_asks_first() {
    let (pump, mut ends) = (pump(1, 1), Ends::new());
    for _ in 0..200 {
        let slot = ends.lend(&pump, PLAIN);
        ends.engine.write_all(&chunk(&last())).unwrap();
        let one = &pump.slots()[slot as usize];
        until("the stream", || one.flags.load(Relaxed) & BACK != 0);
        let back = pump.stop(slot, copied).unwrap();
        assert_eq!((back.reason, back.engine), (Some(Reason::Event), chunk(&last())));
        pump.release(slot).unwrap();
        assert!(pump.take(copied).is_err());
    }
}

#[test]
fn slots_and_descriptors_are_used_again_and_again() {
    let (pump, mut ends) = (pump(2, 2), Ends::new());
    let before = open_descriptors();
    for round in 0..2_000 {
        let slot = ends.lend(&pump, PLAIN);
        if round % 3 == 0 {
            ends.engine.write_all(&chunk(&token("a"))).unwrap();
            ends.receive(chunk(&token("a")).len());
        }
        let back = pump.stop(slot, copied).unwrap();
        assert_eq!((back.reason, back.engine.len() + back.client.len()), (Some(Reason::Stopped), 0));
        pump.release(slot).unwrap();
    }
    // Other tests run beside this one.
    assert!(open_descriptors() < before + 500);
    let (slot, _) = (ends.lend(&pump, PLAIN), ends.lend(&pump, PLAIN));
    let copy = || TcpStream::from(OwnedFd::from(ends.of_engine.try_clone().unwrap()));
    let full = pump.add(copy(), copy(), Parser::new(PLAIN, 0), BOUNDS, 0, 0);
    assert_eq!(full.err().unwrap().raw_os_error(), Some(libc::EMFILE));
    drop(pump.stop(slot, copied));
}

#[test]
fn a_descriptor_above_the_bound_is_no_copy() {
    let ends = Ends::new();
    let refused = sys::copy(ends.of_engine.as_raw_fd(), 1).err().unwrap();
    assert_eq!(refused.raw_os_error(), Some(libc::EMFILE));
    assert!(sys::copy(-1, 0).is_err());
    assert!(sys::copy(1 << 20, 0).is_err());
}

/// Streams that are cut at random, stopped and lent again at random, by many threads of a pump at the same time.
#[test]
fn many_streams_lose_nothing() {
    let streams = if cfg!(debug_assertions) { 60 } else { 300 };
    let pump = pump(4, 1_024);
    let expected: Vec<Vec<u8>> = (0..streams)
        .map(|number| (0..40).flat_map(|count| token(&format!("{number} {count}"))).chain(last()).collect())
        .collect();
    let mut ends: Vec<Ends> = (0..streams).map(|_| Ends::new()).collect();
    let writers: Vec<_> = ends
        .iter()
        .enumerate()
        .map(|(number, one)| {
            let mut engine = one.engine.try_clone().unwrap();
            let chunks: Vec<u8> = (0..40)
                .flat_map(|count| chunk(&token(&format!("{number} {count}"))))
                .chain(chunk(&last()))
                .collect();
            (number, chunks, move |piece: &[u8]| engine.write_all(piece).unwrap())
        })
        .collect();
    let feeder = std::thread::spawn(move || {
        let mut draw = Draw::new(7);
        let mut writers = writers;
        while !writers.is_empty() {
            let place = draw.below(writers.len());
            let (_, left, write) = &mut writers[place];
            let size = left.len().min(1 + draw.below(900));
            write(&left.drain(..size).collect::<Vec<_>>());
            if left.is_empty() {
                drop(writers.swap_remove(place));
            }
        }
    });
    let mut draw = Draw::new(8);
    let mut held: Vec<Vec<u8>> = vec![Vec::new(); streams]; // What was given back, and is to be lent again.
    let mut away: Vec<Option<u32>> = vec![None; streams];
    let mut done = 0;
    let mut received: Vec<Vec<u8>> = vec![Vec::new(); streams];
    for (number, one) in ends.iter().enumerate() {
        away[number] = Some(one.lend(&pump, PLAIN));
    }
    let begun = Instant::now();
    while done < streams {
        assert!(begun.elapsed() < PATIENCE);
        let back = match pump.take(copied) {
            Ok(back) => back,
            Err(_) => {
                let Some(slot) = away[draw.below(streams)] else { continue };
                pump.stop(slot, copied).unwrap()
            }
        };
        let number = away.iter().position(|one| *one == Some(back.slot)).unwrap();
        pump.release(back.slot).unwrap();
        away[number] = None;
        (&ends[number].of_client).write_all(&back.client).unwrap();
        held[number] = back.engine;
        if back.reason == Some(Reason::Event) {
            done += 1;
            continue;
        }
        assert_eq!(back.reason, Some(Reason::Stopped));
        // As Python does: what was not taken is read there until a chunk is whole.
        let mut parser = Parser::new(PLAIN, 0);
        let mut out = Vec::new();
        let mut data = std::mem::take(&mut held[number]);
        loop {
            let fed = parser.feed(&data, &mut Default::default(), &mut out);
            if fed.reason.is_some() || parser.held().is_empty() {
                break;
            }
            let mut more = [0; 1];
            data.clear();
            match (&ends[number].of_engine).read(&mut more) {
                Ok(size) => data.extend_from_slice(&more[..size]),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        (&ends[number].of_client).write_all(&out).unwrap();
        if parser.held().is_empty() {
            away[number] = Some(ends[number].lend(&pump, PLAIN));
        } else {
            held[number] = parser.held().to_vec();
            done += 1;
        }
    }
    feeder.join().unwrap();
    for (number, mut one) in ends.drain(..).enumerate() {
        drop(one.of_client);
        one.client.read_to_end(&mut received[number]).unwrap();
        let all = [payload(&received[number]).0, payload(&held[number]).0].concat();
        assert_eq!(all, expected[number], "stream {number}");
    }
}
