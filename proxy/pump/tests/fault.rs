//! A thread of the pump that fails. Alone in its process: the epoll that it breaks is found by its kind.
mod common;

use balanceroute_native::parser::{Parser, Reason};
use balanceroute_native::pump::{Options, Pump};
use balanceroute_native::stream::Bounds;
use balanceroute_native::sys;
use common::{chunk, token, PLAIN};
use std::fs::{read_dir, read_link, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Puts another file in the place of every epoll.
fn break_epolls() {
    let nothing = File::open("/dev/null").unwrap();
    for entry in read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        if read_link(&path).is_ok_and(|link| link.to_string_lossy().contains("eventpoll")) {
            let number = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
            // SAFETY: both are open, and stay so.
            assert_eq!(unsafe { libc::dup2(nothing.as_raw_fd(), number) }, number);
        }
    }
}

#[test]
fn a_thread_that_fails_gives_its_streams_back_and_gets_no_more() {
    let pump = Pump::new(Options { threads: 1, slots: 8, bounds_ns: vec![] }).unwrap();
    let pairs: Vec<_> = (0..4).map(|_| (UnixStream::pair().unwrap(), UnixStream::pair().unwrap())).collect();
    let lend = |number: usize| {
        let ((_, engine), (_, client)) = &pairs[number];
        let copy = |one: &UnixStream| TcpStream::from(sys::copy(one.as_raw_fd(), 0).unwrap());
        let bounds = Bounds { high: 65_536, low: 16_384 };
        pump.add(copy(engine), copy(client), Parser::new(PLAIN, 0), bounds, 0, 0)
    };
    let slots: Vec<u32> = (0..3).map(|number| lend(number).unwrap()).collect();
    let half = &chunk(&token("a"))[..30];
    let send = |number: usize, bytes: &[u8]| (&pairs[number].0 .0).write_all(bytes).unwrap();
    send(1, &[&chunk(&token("a"))[..], half].concat());
    let mut passed = vec![0; chunk(&token("a")).len()];
    (&pairs[1].1 .0).read_exact(&mut passed).unwrap();
    break_epolls();
    send(2, &chunk(&token("a"))); // Its thread wakes, if it slept, and cannot wait again.
    let (mut back, begun) = (Vec::new(), Instant::now());
    while back.len() < 3 {
        assert!(begun.elapsed() < Duration::from_secs(60));
        back.extend(
            pump.take(|one| (one.slot, one.reason, one.error, one.engine.clone(), one.client.clone())),
        );
    }
    back.sort_by_key(|one| one.0);
    for ((one, slot), held) in back.iter().zip(&slots).zip([b"", half, b""]) {
        assert_eq!(*one, (*slot, Some(Reason::Fault), 0, held.to_vec(), vec![]));
        pump.release(*slot).unwrap();
    }
    assert_eq!(lend(3).unwrap_err().raw_os_error(), Some(libc::EIO));
}
