//! What the pump takes of a stream: bytes in, the client's bytes out, without IO.
//!
//! An event is taken only if Python's reader would take it, and it comes out as that would write it
//! (`proxy/live/openai`: `completion_stream.py`, `named_events.py`, `token_stream.py`). At anything else
//! the parser stops, and gives back whole chunks, so that Python goes on as if it had read them.
#![forbid(unsafe_code)]

use crate::counts::{self, Count};
use crate::kept::{hide_ids, Form, TokenIds, Transcript};
use crate::marks::MARKS;
use memchr::{memchr, memchr_iter};

/// The largest chunk that is taken.
pub const MOST_CHUNK: usize = 0xffff;
/// The most that is kept of a stream's ids and texts.
pub const MOST_KEPT: usize = 1 << 20;
const LONGEST_SIZE: usize = 4;
const BLANK_LINE: &[u8] = b"\n\n";
// As vLLM writes the events that bring tokens.
const TOKENS: [&[u8]; 6] = [
    b"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\"",
    b"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"thinking_delta\"",
    b"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"input_json_delta\"",
    b"event: response.output_text.delta\ndata: ",
    b"event: response.reasoning_text.delta\ndata: ",
    b"event: response.function_call_arguments.delta\ndata: ",
];

/// Why a stream is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Reason {
    /// The next event is no token event.
    Event = 1,
    /// The next chunk is not plain.
    Chunk = 2,
    /// The engine closed its side.
    End = 3,
    /// Reading failed, or the engine's connection did.
    Engine = 4,
    /// Writing failed.
    Client = 5,
    /// As much is kept as may be.
    Limit = 6,
    /// Python asked for it.
    Stopped = 7,
    /// The pump failed.
    Fault = 9,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Chats and completions.
    Completion,
    /// Messages and responses.
    Named,
    /// Token ids in place of text.
    Generate,
}

/// What the reader in Python is like.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub kind: Kind,
    /// Tokens are counted as the engine counts them.
    pub counted: bool,
    /// Its counts are cut out.
    pub hide: bool,
    /// Events with usage are given back: they are to be rewritten.
    pub no_usage: bool,
    /// The client gets chunks.
    pub chunked: bool,
    /// Ids are kept; of completions, they are cut out of this form.
    pub ids: Option<Form>,
    /// Ids wait in Python for the next text that counts.
    pub ids_wait: bool,
    /// Text is kept.
    pub text: bool,
}

impl Settings {
    /// Chunks of events whose tokens are not counted, of which nothing is cut and nothing kept.
    pub const fn plain(kind: Kind) -> Self {
        Self {
            kind,
            counted: false,
            hide: false,
            no_usage: false,
            chunked: true,
            ids: None,
            ids_wait: false,
            text: false,
        }
    }
}

/// What came of one piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fed {
    /// Why nothing more is taken; none while the stream goes on.
    pub reason: Option<Reason>,
    /// Events that were taken.
    pub events: u32,
    /// Of them, those that were counted as one token for want of the engine's count.
    pub uncounted: u32,
}

/// Room that one parser after the other works in.
#[derive(Default)]
pub struct Scratch {
    body: Vec<u8>,
    event: Vec<u8>,
}

pub struct Parser {
    settings: Settings,
    held: Vec<u8>,
    tokens: u32,
    pub ids: TokenIds,
    pub transcript: Transcript,
}

enum Chunk {
    /// Where its payload begins and ends, in one that is there as a whole.
    Whole(usize, usize),
    Partial,
    Other,
}

impl Parser {
    /// `tokens`: how many were counted so far.
    pub fn new(settings: Settings, tokens: u32) -> Self {
        Self {
            settings,
            held: Vec::new(),
            tokens,
            ids: TokenIds::new(settings.ids_wait),
            transcript: Transcript::default(),
        }
    }

    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// What was read and not taken.
    pub fn held(&self) -> &[u8] {
        &self.held
    }

    /// Takes what it can of the next bytes, and appends what is the client's to `out`.
    ///
    /// Feed no more once there was a reason.
    pub fn feed(&mut self, data: &[u8], scratch: &mut Scratch, out: &mut Vec<u8>) -> Fed {
        let mut fed = Fed::default();
        scratch.body.clear();
        if self.held.is_empty() {
            let taken = self.take_chunks(data, scratch, &mut fed);
            self.held.extend_from_slice(&data[taken..]);
        } else {
            let mut held = std::mem::take(&mut self.held);
            held.extend_from_slice(data);
            let taken = self.take_chunks(&held, scratch, &mut fed);
            if taken == 0 {
                self.held = held;
            } else {
                self.held.extend_from_slice(&held[taken..]);
            }
        }
        let body = &scratch.body;
        if !body.is_empty() {
            if self.settings.chunked {
                write_size(body.len(), out);
            }
            out.extend_from_slice(body);
            if self.settings.chunked {
                out.extend_from_slice(b"\r\n");
            }
        }
        fed
    }

    /// Returns how many bytes were taken; of a chunk of which a part was, what stands before the rest is held.
    fn take_chunks(&mut self, data: &[u8], scratch: &mut Scratch, fed: &mut Fed) -> usize {
        let mut at = 0;
        while at < data.len() {
            let (begin, end) = match next_chunk(&data[at..]) {
                Chunk::Whole(begin, end) => (at + begin, at + end),
                Chunk::Partial => break,
                Chunk::Other => {
                    fed.reason = Some(Reason::Chunk);
                    break;
                }
            };
            let taken = self.take_events(&data[begin..end], scratch, fed);
            if taken == 0 {
                break;
            }
            if taken < end - begin {
                write_size(end - begin - taken, &mut self.held);
                return begin + taken;
            }
            at = end + 2;
        }
        at
    }

    /// Returns how many bytes of a chunk's payload were taken.
    fn take_events(&mut self, payload: &[u8], scratch: &mut Scratch, fed: &mut Fed) -> usize {
        let mut at = 0;
        while at < payload.len() {
            let Some(length) = event_length(&payload[at..]) else {
                fed.reason = Some(Reason::Chunk);
                break;
            };
            if self.ids.size() + self.transcript.size() + length > MOST_KEPT {
                fed.reason = Some(Reason::Limit);
                break;
            }
            let mark = scratch.body.len();
            let Some(tokens) = self.take_event(&payload[at..at + length], scratch, fed) else {
                scratch.body.truncate(mark);
                fed.reason = Some(Reason::Event);
                break;
            };
            self.tokens = tokens;
            fed.events += 1;
            at += length + BLANK_LINE.len();
        }
        at
    }

    /// Appends what of an event, given without the blank line behind it, is the client's, with that line.
    ///
    /// Returns the tokens so far; none if it is not taken, whatever was appended.
    fn take_event(&mut self, event: &[u8], scratch: &mut Scratch, fed: &mut Fed) -> Option<u32> {
        match self.settings.kind {
            Kind::Completion => self.take_completion(event, scratch, fed),
            Kind::Generate => self.take_generated(event, &mut scratch.body),
            Kind::Named => {
                if !TOKENS.iter().any(|begin| event.starts_with(begin)) {
                    return None;
                }
                pass(event, &mut scratch.body);
                Some(self.tokens.saturating_add(1))
            }
        }
    }

    fn take_completion(&mut self, event: &[u8], scratch: &mut Scratch, fed: &mut Fed) -> Option<u32> {
        let settings = self.settings;
        let Scratch { body, event: changed } = scratch;
        MARKS.going_on.find(event)?;
        if settings.no_usage && MARKS.usage.find(event).is_some() {
            return None;
        }
        let mark = body.len();
        let count = match settings.ids {
            None => self.count(event, body),
            Some(form) => match self.ids.find_single(event, form) {
                Some(place) => {
                    self.ids.keep_single(&event[place.clone()]);
                    changed.clear();
                    hide_ids(event, place, changed);
                    self.count(changed, body)
                }
                None => {
                    if MARKS.role.find(event).is_some() || MARKS.nothing.find(event).is_some() {
                        return None;
                    }
                    changed.clear();
                    let count = self.count(event, changed);
                    if settings.hide && MARKS.usage.find(changed).is_some() {
                        return None; // It may have to be rewritten.
                    }
                    let place = TokenIds::find_any(changed)?;
                    hide_ids(changed, place.clone(), body);
                    self.ids.keep_any(changed, place);
                    if settings.text {
                        changed.clear();
                        pass(event, changed);
                        self.transcript.keep(changed);
                        return Some(self.counted(count, fed));
                    }
                    count
                }
            },
        };
        if settings.text {
            self.transcript.keep(&body[mark..]);
        }
        Some(self.counted(count, fed))
    }

    fn count(&self, event: &[u8], out: &mut Vec<u8>) -> Count {
        if self.settings.counted {
            return counts::take_line(event, self.settings.hide, out);
        }
        pass(event, out);
        Count::Untold
    }

    fn counted(&self, count: Count, fed: &mut Fed) -> u32 {
        match count {
            Count::Told(told) => self.tokens.max(told.unwrap_or(0)),
            Count::Untold => {
                fed.uncounted += u32::from(self.settings.counted);
                self.tokens.saturating_add(1)
            }
        }
    }

    fn take_generated(&mut self, event: &[u8], body: &mut Vec<u8>) -> Option<u32> {
        MARKS.going_on.find(event)?;
        if MARKS.usage_object.find(event).is_some() {
            return None;
        }
        let mut tokens = 1;
        if let Some(begin) = MARKS.ids.find(event) {
            let ids = &event[begin + MARKS.ids.needle().len()..];
            let ids = &ids[..memchr(b']', ids)?];
            tokens = match ids.iter().all(|one| counts::is_blank(*one)) {
                true => 0,
                false => memchr_iter(b',', ids).count() as u32 + 1,
            };
            if self.settings.ids.is_some() && !ids.is_empty() {
                self.ids.keep_single(ids);
            }
        } else if self.settings.ids.is_some() {
            return None;
        }
        let mark = body.len();
        pass(event, body);
        if self.settings.text {
            self.transcript.keep(&body[mark..]);
        }
        Some(self.tokens.saturating_add(tokens))
    }
}

fn pass(event: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(event);
    out.extend_from_slice(BLANK_LINE);
}

/// The length of the event at the beginning of a chunk's rest, without its blank line.
///
/// None if there is no whole one, or it has other line ends.
fn event_length(rest: &[u8]) -> Option<usize> {
    let length = MARKS.blank_line.find(rest)?;
    let plain = rest[0] != b'\n' && memchr(b'\r', &rest[..length]).is_none();
    plain.then_some(length)
}

fn next_chunk(data: &[u8]) -> Chunk {
    let digits = data.iter().take(LONGEST_SIZE + 1).take_while(|one| one.is_ascii_hexdigit()).count();
    let size = data[..digits.min(LONGEST_SIZE)]
        .iter()
        .fold(0, |sum, digit| sum << 4 | char::from(*digit).to_digit(16).unwrap_or(0) as usize);
    let begin = digits + 2;
    let end = begin + size;
    if digits > LONGEST_SIZE
        || !b"\r\n".starts_with(part(data, digits))
        || !b"\r\n".starts_with(part(data, end))
    {
        return Chunk::Other;
    }
    if digits == data.len() {
        return Chunk::Partial;
    }
    if size == 0 {
        return Chunk::Other; // No number, or the last one.
    }
    if data.len() < end + 2 {
        return Chunk::Partial;
    }
    Chunk::Whole(begin, end)
}

/// The next two bytes, as far as they are there.
fn part(data: &[u8], at: usize) -> &[u8] {
    let end = data.len().min(at + 2);
    data.get(at..end).unwrap_or(b"")
}

fn write_size(size: usize, out: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = (usize::BITS - size.leading_zeros()).div_ceil(4).max(1);
    out.extend((0..digits).rev().map(|place| DIGITS[size >> (4 * place) & 15]));
    out.extend_from_slice(b"\r\n");
}
