//! What Python reads while the pump goes on: a cache line for each stream, and the gaps between events.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// The client reads too slowly.
pub const PAUSED: u32 = 1;
/// It came back.
pub const BACK: u32 = 2;

/// How far one stream is.
#[repr(C, align(64))]
#[derive(Default)]
pub struct Slot {
    pub tokens: AtomicU32,
    pub events: AtomicU32,
    pub last_ns: AtomicU64,
    pub gap_max_ns: AtomicU64,
    pub written: AtomicU64,
    pub waiting: AtomicU32,
    pub flags: AtomicU32,
    pub drained_ns: AtomicU64,
    pub resumed_ns: AtomicU64,
    pub uncounted: AtomicU32,
    pub generation: AtomicU32,
}

const _: () = assert!(size_of::<Slot>() == 64);

impl Slot {
    pub fn begin(&self, tokens: u32, last_ns: u64, gap_max_ns: u64, generation: u32) {
        self.tokens.store(tokens, Relaxed);
        self.last_ns.store(last_ns, Relaxed);
        self.gap_max_ns.store(gap_max_ns, Relaxed);
        self.generation.store(generation, Relaxed);
        for zero in [&self.events, &self.waiting, &self.flags, &self.uncounted] {
            zero.store(0, Relaxed);
        }
        for zero in [&self.written, &self.drained_ns, &self.resumed_ns] {
            zero.store(0, Relaxed);
        }
    }
}

/// One thread's histogram of the gaps between events: counts by bucket, and their sum at the end.
pub struct Gaps<'a> {
    bounds_ns: &'a [u64],
    counts: &'a [AtomicU64],
}

impl<'a> Gaps<'a> {
    /// `counts`: one for each bound, one without, and the sum.
    pub fn new(bounds_ns: &'a [u64], counts: &'a [AtomicU64]) -> Self {
        assert_eq!(counts.len(), bounds_ns.len() + 2);
        Self { bounds_ns, counts }
    }

    pub fn observe(&self, gap_ns: u64) {
        let bucket = self.bounds_ns.partition_point(|bound| *bound < gap_ns);
        // Only this thread writes it.
        for (place, value) in [(bucket, 1), (self.counts.len() - 1, gap_ns)] {
            let sum = self.counts[place].load(Relaxed).wrapping_add(value);
            self.counts[place].store(sum, Relaxed);
        }
    }
}
