//! What is kept of a stream for the case that another engine is to go on with it: ids, or text.
//!
//! As `proxy/live/openai/token_ids.py`, `generated_ids.py` and `transcript.py` keep it.
#![forbid(unsafe_code)]

use crate::marks::{last, MARKS};
use memchr::memchr;
use std::ops::Range;

/// What stands between a text and its ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Chat,
    Completion,
}

/// The ids that came since they were last taken out.
#[derive(Default)]
pub struct TokenIds {
    /// Each with a comma before it.
    pub kept: Vec<u8>,
    /// Those behind the last text that counts, with commas between them.
    pub new: Vec<u8>,
    /// Whether there is anything behind it, if only an event without ids.
    pub has_new: bool,
    /// Events with text that do not count.
    pub behind: Vec<u8>,
    /// Whether anything is behind it, here or in Python.
    waits: bool,
}

impl TokenIds {
    /// `waits`: whether Python has ids behind the last text that counts.
    pub fn new(waits: bool) -> Self {
        Self { waits, ..Self::default() }
    }

    pub fn size(&self) -> usize {
        self.kept.len() + self.new.len() + self.behind.len()
    }

    /// Returns what came so far, and goes on without it.
    pub fn take(&mut self) -> Self {
        let waits = self.waits;
        std::mem::replace(self, Self::new(waits))
    }

    /// Where the id stands in an event with text and one id, as most are.
    pub fn find_single(&self, event: &[u8], form: Form) -> Option<Range<usize>> {
        if self.waits || !event.ends_with(b"}") {
            return None;
        }
        let before = match form {
            Form::Chat => &MARKS.before_chat_ids,
            Form::Completion => &MARKS.before_completion_ids,
        };
        let mark = last(before, event)?;
        let begin = mark + before.needle().len();
        let end = begin + memchr(b']', &event[begin..])?;
        let text_end = mark.checked_sub(1).map_or(b'}', |at| event[at]);
        let is_one = end > begin && event[begin..end].iter().all(u8::is_ascii_digit);
        // Else there is no text, or one that ends with a quote.
        (is_one && text_end != b'"').then_some(begin..end)
    }

    /// Where the ids stand in any event.
    pub fn find_any(event: &[u8]) -> Option<Range<usize>> {
        let begin = last(&MARKS.ids, event)? + MARKS.ids.needle().len();
        let end = begin + memchr(b']', &event[begin..])?;
        event.ends_with(b"}\n\n").then_some(begin..end)
    }

    pub fn keep_single(&mut self, ids: &[u8]) {
        self.kept.push(b',');
        self.kept.extend_from_slice(ids);
    }

    /// Keeps the ids that stand there in an event with its blank line.
    pub fn keep_any(&mut self, event: &[u8], place: Range<usize>) {
        let ids = &event[place];
        if !ids.is_empty() {
            if !self.new.is_empty() {
                self.new.push(b',');
            }
            self.new.extend_from_slice(ids);
        }
        (self.has_new, self.waits) = (true, true);
        if MARKS.no_text.find(event).is_some() {
            return;
        }
        if ids.is_empty() || memchr(b',', ids).is_some() {
            self.behind.extend_from_slice(event);
            return;
        }
        self.kept.push(b',');
        self.kept.append(&mut self.new);
        self.behind.clear();
        (self.has_new, self.waits) = (false, false);
    }
}

/// Appends an event with null for the ids that stand there.
pub fn hide_ids(event: &[u8], place: Range<usize>, out: &mut Vec<u8>) {
    out.extend_from_slice(&event[..place.start - 1]);
    out.extend_from_slice(b"null");
    out.extend_from_slice(&event[place.end + 1..]);
}

const WHOLE_EVENT: u32 = 1 << 31;

/// The text that came since it was last taken out.
#[derive(Default)]
pub struct Transcript {
    /// Each piece behind its length; with the highest bit, a whole event that Python is to read.
    pub pieces: Vec<u8>,
    /// The event with the latest tokens.
    pub last: Vec<u8>,
}

impl Transcript {
    pub fn size(&self) -> usize {
        self.pieces.len()
    }

    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// Keeps the text of an event with its blank line.
    pub fn keep(&mut self, event: &[u8]) {
        self.last.clear();
        self.last.extend_from_slice(event);
        match plain_text(event) {
            Some(piece) => self.record(&event[piece], 0),
            None => self.record(event, WHOLE_EVENT),
        }
    }

    fn record(&mut self, bytes: &[u8], kind: u32) {
        // An event is no longer than a chunk.
        self.pieces.extend_from_slice(&(bytes.len() as u32 | kind).to_le_bytes());
        self.pieces.extend_from_slice(bytes);
    }
}

/// Where the text stands in an event that carries nothing else, if nothing in it is escaped.
fn plain_text(event: &[u8]) -> Option<Range<usize>> {
    let (mark, at, end_mark) = match MARKS.chat_text.find(event) {
        Some(at) => (&MARKS.chat_text, at, b'}'),
        None => (&MARKS.completion_text, MARKS.completion_text.find(event)?, b','),
    };
    let begin = at + mark.needle().len();
    let end = begin + memchr(b'"', &event[begin..])?;
    let plain = memchr(b'\\', &event[begin..end]).is_none() && event.get(end + 1) == Some(&end_mark);
    plain.then_some(begin..end)
}
