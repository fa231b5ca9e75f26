//! The floor of what a proxy may cost: moves bytes between clients and engines, and reads none of them.
//!
//!     bare_relay PORT ENGINE_PORT [ENGINE_PORT ...]
//!
//! One thread, all on 127.0.0.1. Each connection has an engine of its own, in turns. It waits for whoever
//! does not take bytes, with everybody else: it is for measurements by quick peers alone.
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};

const LISTENER: u64 = u64::MAX;
const PIECE: usize = 64 << 10;
const EVENTS: usize = 512;

/// Both ends of each connection, by their descriptors: what one sends goes to the other.
type Ends = Vec<Option<(TcpStream, RawFd)>>;

fn checked(result: i32) -> io::Result<i32> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn follow(epoll: RawFd, descriptor: RawFd, token: u64) -> io::Result<()> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: token };
    // SAFETY: the event lives until the call returns.
    checked(unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, descriptor, &mut event) }).map(drop)
}

fn write_all(mut to: &TcpStream, mut data: &[u8]) -> io::Result<()> {
    while !data.is_empty() {
        match to.write(data) {
            Ok(count) => data = &data[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let mut one = libc::pollfd { fd: to.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
                // SAFETY: the struct lives until the call returns.
                checked(unsafe { libc::poll(&mut one, 1, -1) })?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn take(ends: &mut Ends, one: TcpStream, other: RawFd) -> io::Result<RawFd> {
    one.set_nodelay(true)?;
    one.set_nonblocking(true)?;
    let descriptor = one.as_raw_fd();
    let place = descriptor as usize;
    if ends.len() <= place {
        ends.resize_with(place + 1, || None);
    }
    ends[place] = Some((one, other));
    Ok(descriptor)
}

fn accept(epoll: RawFd, ends: &mut Ends, client: TcpStream, engine: u16) -> io::Result<()> {
    let engine = TcpStream::connect(("127.0.0.1", engine))?;
    let its = engine.as_raw_fd();
    let descriptor = take(ends, client, its)?;
    take(ends, engine, descriptor)?;
    follow(epoll, descriptor, descriptor as u64)?;
    follow(epoll, its, its as u64)
}

/// Moves what there is to read; returns false at the end.
fn moved(ends: &Ends, place: usize, piece: &mut [u8]) -> bool {
    let Some((from, other)) = &ends[place] else { return true }; // Closed in this round.
    let Some((to, _)) = &ends[*other as usize] else { return false };
    let mut source = from;
    match source.read(piece) {
        Ok(0) => false,
        Ok(count) => write_all(to, &piece[..count]).is_ok(),
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    }
}

fn main() -> io::Result<()> {
    let ports: Vec<u16> = std::env::args().skip(1).map(|one| one.parse().expect("a port")).collect();
    let (own, engines) = ports.split_first().expect("a port to listen at");
    let listener = TcpListener::bind(("127.0.0.1", *own))?;
    // SAFETY: no pointers.
    let epoll = checked(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
    follow(epoll, listener.as_raw_fd(), LISTENER)?;
    let (mut ends, mut piece, mut turn): (Ends, _, usize) = (Vec::new(), vec![0; PIECE], 0);
    let mut events = vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS];
    loop {
        // SAFETY: the kernel writes at most as many events as there is room for.
        let found = unsafe { libc::epoll_wait(epoll, events.as_mut_ptr(), EVENTS as i32, -1) };
        for event in &events[..found.max(0) as usize] {
            let token = event.u64;
            if token == LISTENER {
                let (client, _) = listener.accept()?;
                accept(epoll, &mut ends, client, engines[turn % engines.len()])?;
                turn += 1;
            } else if !moved(&ends, token as usize, &mut piece) {
                if let Some((_, other)) = ends[token as usize].take() {
                    ends[other as usize] = None;
                }
            }
        }
    }
}
