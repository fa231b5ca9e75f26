//! One large JSON object, read once: where do its members stand, and what do its prompts consist of?
//!
//! The same as `json_scan.py` tells of a usual object. Whatever else there is in one (an error, a member
//! twice, an escaped name, a limit) is not judged here: the object is then "unusual", and Python reads it.
use crate::BrBytes;

pub const MOST_MEMBERS: usize = 1_000;
pub const MOST_LEVELS: usize = 1_024;
const MOST_PROMPTS: usize = 4;
const HEADS: usize = 4;
/// Bytes of a number; Python has the limits that are near it.
const MOST_NUMBER: usize = 4_000;
/// Digits of a token id.
const MOST_DIGITS: usize = 19;
/// Bytes of a string that are read in one go.
const WINDOW: usize = 65_536;
const BLOCK: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    More = 0,
    Complete = 1,
    Unusual = 2,
}

/// Where a member begins, where its name ends, where its value begins and where that ends.
pub type Member = [u32; 4];

/// What a prompt consists of: `PromptSummary`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Summary {
    pub characters: u64,
    pub inner: u64,
    /// Which member it is.
    pub member: u32,
    pub texts: u32,
    pub integers: u32,
    pub arrays: u32,
    pub objects: u32,
    pub data_strings: u32,
    pub last: u32,
    pub n_heads: u32,
    pub heads: [[u32; 2]; HEADS],
}

/// How far an object is read; zeroes but for the limits and the names in the beginning.
#[repr(C)]
pub struct Scan {
    /// Names of members to summarise, and of those that hold no text, each with a NUL behind it.
    pub prompts: BrBytes,
    pub data_members: BrBytes,
    pub most_containers: u32,
    pub most_strings: u32,
    pub most_levels: u32,
    pub most_key: u32,
    pub at: u32,
    pub next: u32,
    pub depth: u32,
    pub containers: u32,
    pub strings: u32,
    /// The present string is data, or where data is.
    pub is_data: u32,
    pub n_members: u32,
    /// Of `summaries`; the last one is the present member's if `is_prompt`.
    pub n_summaries: u32,
    pub is_prompt: u32,
    pub reserved: u32,
    pub summaries: [Summary; MOST_PROMPTS],
    pub members: [Member; MOST_MEMBERS],
    pub stack: [u8; MOST_LEVELS],
}

/// What is expected.
mod next {
    pub const BEGIN: u32 = 0;
    pub const FIRST_KEY: u32 = 1;
    pub const KEY: u32 = 2;
    pub const FIRST_VALUE: u32 = 3;
    pub const VALUE: u32 = 4;
    pub const STRING: u32 = 5;
    pub const COLON: u32 = 6;
    pub const COMMA: u32 = 7;
    pub const END: u32 = 8;
}

struct Unusual;
type Usual<T> = Result<T, Unusual>;

enum Kind {
    Text,
    Integer,
    Array,
    Object,
    Other,
}

/// Reads on for about so many bytes.
pub fn advance(scan: &mut Scan, names: Names, data: &[u8], work: usize) -> Outcome {
    let fits = (scan.most_levels as usize) < MOST_LEVELS && u32::try_from(data.len()).is_ok();
    if !fits || scan.at as usize > data.len() {
        return Outcome::Unusual;
    }
    let until = (scan.at as usize).saturating_add(work);
    let mut reader = Reader { at: scan.at as usize, scan, names, data };
    let outcome = reader.read(until);
    let at = reader.at;
    scan.at = at as u32;
    outcome.unwrap_or(Outcome::Unusual)
}

/// The names that matter, each with a NUL behind it.
#[derive(Clone, Copy)]
pub struct Names<'a> {
    pub prompts: &'a [u8],
    pub data_members: &'a [u8],
}

fn has(names: &[u8], name: &[u8]) -> bool {
    names.split(|&byte| byte == 0).any(|one| one == name) && !name.is_empty()
}

struct Reader<'a> {
    at: usize,
    scan: &'a mut Scan,
    names: Names<'a>,
    data: &'a [u8],
}

impl Reader<'_> {
    fn read(&mut self, until: usize) -> Usual<Outcome> {
        while self.at < until {
            if self.scan.next != next::STRING {
                while self.at < until && matches!(self.peek(), b' ' | b'\n' | b'\t' | b'\r') {
                    self.at += 1;
                }
                if self.at == until {
                    break;
                }
            }
            match self.scan.next {
                next::BEGIN if self.peek() == b'{' => self.open(b'{')?,
                next::FIRST_KEY if self.peek() == b'}' => self.close()?,
                next::FIRST_KEY | next::KEY if self.peek() == b'"' => self.key()?,
                next::FIRST_VALUE if self.peek() == b']' => self.close()?,
                next::FIRST_VALUE | next::VALUE => self.value(until)?,
                next::STRING => self.string()?,
                next::COLON if self.peek() == b':' => {
                    self.at += 1;
                    self.scan.next = next::VALUE;
                }
                next::COMMA => self.comma()?,
                next::END if self.at == self.data.len() => return Ok(Outcome::Complete),
                _ => return Err(Unusual),
            }
        }
        Ok(Outcome::More)
    }

    /// The next byte; behind the last one 0, which stands nowhere in JSON.
    fn peek(&self) -> u8 {
        self.data.get(self.at).copied().unwrap_or(0)
    }

    fn depth(&self) -> usize {
        self.scan.depth as usize
    }

    fn summary(&mut self) -> Option<&mut Summary> {
        let present = (self.scan.n_summaries as usize).checked_sub(1)?;
        if self.scan.is_prompt == 0 {
            return None;
        }
        self.scan.summaries.get_mut(present)
    }

    fn open(&mut self, bracket: u8) -> Usual<()> {
        self.scan.containers += 1;
        if self.scan.containers > self.scan.most_containers || self.scan.depth == self.scan.most_levels {
            return Err(Unusual);
        }
        let depth = self.depth();
        self.scan.stack[depth] = bracket;
        self.scan.depth += 1;
        self.at += 1;
        self.scan.next = if bracket == b'[' { next::FIRST_VALUE } else { next::FIRST_KEY };
        Ok(())
    }

    fn close(&mut self) -> Usual<()> {
        self.scan.depth -= 1;
        self.at += 1;
        if self.scan.depth == 2 {
            let end = self.at as u32;
            if let Some(summary) = self.summary() {
                if let Some(head) = summary.heads.get_mut(summary.n_heads as usize) {
                    *head = [summary.last, end];
                    summary.n_heads += 1;
                }
            }
        }
        self.ended();
        Ok(())
    }

    /// A value is complete.
    fn ended(&mut self) {
        self.scan.next = if self.scan.depth == 0 { next::END } else { next::COMMA };
        if self.scan.depth == 1 {
            self.scan.members[self.scan.n_members as usize][3] = self.at as u32;
            self.scan.n_members += 1;
            self.scan.is_prompt = 0;
        }
    }

    fn comma(&mut self) -> Usual<()> {
        let is_array = self.scan.stack[self.depth() - 1] == b'[';
        match self.peek() {
            b',' => {
                self.at += 1;
                self.scan.next = if is_array { next::VALUE } else { next::KEY };
                Ok(())
            }
            b']' if is_array => self.close(),
            b'}' if !is_array => self.close(),
            _ => Err(Unusual),
        }
    }

    fn key(&mut self) -> Usual<()> {
        self.count_string()?;
        let begin = self.at;
        let limit = self.data.len().min(begin + self.scan.most_key as usize);
        let mut piece = Piece { at: begin + 1, ended: false, characters: 0, escaped: false };
        while !piece.ended {
            if piece.at >= limit {
                return Err(Unusual);
            }
            piece.read(self.data, limit)?;
        }
        let end = piece.at - 1;
        self.at = piece.at;
        self.scan.next = next::COLON;
        let name = &self.data[begin + 1..end];
        let number = self.scan.n_members as usize;
        if self.scan.depth > 1 {
            // Only of a prompt it matters.
            if self.scan.is_prompt != 0 {
                if piece.escaped {
                    return Err(Unusual);
                }
                self.scan.is_data = u32::from(has(self.names.data_members, name));
            }
            return Ok(());
        }
        if piece.escaped || number == MOST_MEMBERS {
            return Err(Unusual);
        }
        self.scan.members[number] = [begin as u32, end as u32, 0, 0];
        self.scan.is_data = 0;
        if has(self.names.prompts, name) {
            let summary = self.scan.summaries.get_mut(self.scan.n_summaries as usize).ok_or(Unusual)?;
            *summary = Summary { member: number as u32, ..Summary::default() };
            self.scan.n_summaries += 1;
            self.scan.is_prompt = 1;
        }
        Ok(())
    }

    fn value(&mut self, until: usize) -> Usual<()> {
        let byte = self.peek();
        if self.scan.depth == 1 {
            self.scan.members[self.scan.n_members as usize][2] = self.at as u32;
        }
        match byte {
            b'"' => {
                self.count(Kind::Text, 1)?;
                self.count_string()?;
                if self.scan.is_data != 0 {
                    if let Some(summary) = self.summary() {
                        summary.data_strings += 1;
                    }
                }
                self.at += 1;
                self.scan.next = next::STRING;
                Ok(())
            }
            b'[' | b'{' => {
                self.count(if byte == b'[' { Kind::Array } else { Kind::Object }, 1)?;
                if self.scan.depth == 2 {
                    let at = self.at as u32;
                    if let Some(summary) = self.summary() {
                        summary.last = at;
                    }
                }
                self.open(byte)
            }
            _ => self.scalars(until),
        }
    }

    fn string(&mut self) -> Usual<()> {
        let limit = self.data.len().min(self.at + WINDOW);
        let mut piece = Piece { at: self.at, ended: false, characters: 0, escaped: false };
        piece.read(self.data, limit)?;
        if !piece.ended && piece.at >= self.data.len() {
            return Err(Unusual);
        }
        self.at = piece.at;
        if self.scan.is_data == 0 {
            if let Some(summary) = self.summary() {
                summary.characters += piece.characters as u64;
            }
        }
        if piece.ended {
            self.ended();
        }
        Ok(())
    }

    /// Reads a number or a word; in an array as many as there are in a row.
    fn scalars(&mut self, until: usize) -> Usual<()> {
        let is_array = self.scan.stack[self.depth() - 1] == b'[';
        let (mut integers, mut others) = (0, 0);
        loop {
            let (length, is_integer) = scalar(&self.data[self.at..])?;
            self.at += length;
            *(if is_integer { &mut integers } else { &mut others }) += 1;
            if !is_array || self.at >= until || self.peek() != b',' {
                break;
            }
            let ahead = self.at + 1 + usize::from(self.data.get(self.at + 1) == Some(&b' '));
            if !self.data.get(ahead).is_some_and(u8::is_ascii_digit) {
                break;
            }
            self.at = ahead;
        }
        self.count(Kind::Integer, integers)?;
        self.count(Kind::Other, others)?;
        self.ended();
        Ok(())
    }

    fn count_string(&mut self) -> Usual<()> {
        self.scan.strings += 1;
        if self.scan.strings > self.scan.most_strings {
            return Err(Unusual);
        }
        Ok(())
    }

    /// Counts elements of the array that a prompt is, or of an array in it.
    fn count(&mut self, kind: Kind, count: u32) -> Usual<()> {
        let depth = self.scan.depth;
        if count == 0 || self.scan.is_prompt == 0 || depth < 2 || self.scan.stack[1] != b'[' {
            return Ok(());
        }
        if depth == 2 {
            self.scan.is_data = 0;
        }
        let is_in_array = self.scan.stack[2] == b'[';
        let Some(summary) = self.summary() else { return Ok(()) };
        match (depth, kind) {
            (2, Kind::Text) => summary.texts += count,
            (2, Kind::Integer) => summary.integers += count,
            (2, Kind::Array) => summary.arrays += count,
            (2, Kind::Object) => summary.objects += count,
            (2, Kind::Other) => return Err(Unusual), // No prompt has any.
            (3, _) if is_in_array => summary.inner += u64::from(count),
            _ => {}
        }
        Ok(())
    }
}

/// A piece of a string.
struct Piece {
    at: usize,
    /// Its quote was read.
    ended: bool,
    characters: usize,
    /// There was an escape.
    escaped: bool,
}

impl Piece {
    /// Reads up to the closing quote; or to `limit`, and not within a character or an escape.
    fn read(&mut self, data: &[u8], limit: usize) -> Usual<()> {
        while self.at < limit {
            let (length, is_ascii) = plain(&data[self.at..limit]);
            let text = &data[self.at..self.at + length];
            self.at += length;
            self.characters += if is_ascii { length } else { self.count(text, self.at == limit)? };
            if self.at >= limit {
                break;
            }
            match data[self.at] {
                b'"' => {
                    self.at += 1;
                    self.ended = true;
                    return Ok(());
                }
                b'\\' => {
                    self.escaped = true;
                    self.characters += 1;
                    self.at += escape(&data[self.at..])?;
                }
                // The first bytes of a character that is cut, or a control character.
                byte if byte >= 0x80 => break,
                _ => return Err(Unusual),
            }
        }
        Ok(())
    }

    /// Counts characters. The last one may be cut if more is to come: then it is left.
    fn count(&mut self, text: &[u8], is_cut: bool) -> Usual<usize> {
        let (begin, count) = common(text);
        let rest = &text[begin..];
        let rest = match std::str::from_utf8(rest) {
            Ok(_) => rest,
            Err(error) if is_cut && error.error_len().is_none() && begin + error.valid_up_to() > 0 => {
                self.at -= rest.len() - error.valid_up_to();
                &rest[..error.valid_up_to()]
            }
            Err(_) => return Err(Unusual),
        };
        Ok(count + rest.iter().filter(|&&byte| (byte as i8) >= -0x40).count())
    }
}

/// How many bytes at the beginning are common characters, and how many of these.
///
/// All but those whose second byte needs a closer look; they take half of the time that they take in `from_utf8`.
fn common(text: &[u8]) -> (usize, usize) {
    let is_next = |byte: u8| byte & 0xC0 == 0x80;
    let (mut at, mut count) = (0, 0);
    while let Some(&[first, second, third]) = text[at..].first_chunk() {
        at += match first {
            0..=0x7F => 1,
            0xC2..=0xDF if is_next(second) => 2,
            0xE1..=0xEC | 0xEE | 0xEF if is_next(second) && is_next(third) => 3,
            0xF0 if second >= 0x90 => match text.get(at + 3) {
                Some(&fourth) if is_next(second) && is_next(third) && is_next(fourth) => 4,
                _ => break,
            },
            _ => break,
        };
        count += 1;
    }
    (at, count)
}

/// How many bytes of a string come before a quote, an escape or a control character; and are all of them ASCII?
fn plain(text: &[u8]) -> (usize, bool) {
    let mut all = 0;
    let mut length = 0;
    for block in text.chunks_exact(BLOCK) {
        // Without a branch, so that it is done with vectors.
        let (special, high) = block.iter().fold((0, 0), |(special, high), &byte| {
            let is_special = u8::from(byte < 0x20) | u8::from(byte == b'"') | u8::from(byte == b'\\');
            (special | is_special, high | byte)
        });
        if special != 0 {
            break;
        }
        all |= high;
        length += BLOCK;
    }
    for &byte in &text[length..] {
        if byte < 0x20 || byte == b'"' || byte == b'\\' {
            break;
        }
        all |= byte;
        length += 1;
    }
    (length, all < 0x80)
}

/// The length of an escape, of two for one character if they are a pair.
fn escape(text: &[u8]) -> Usual<usize> {
    match text.get(1) {
        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(2),
        Some(b'u') => {
            let first = unit(text).ok_or(Unusual)?;
            let is_pair = (0xD800..0xDC00).contains(&first)
                && text.get(6..8) == Some(b"\\u")
                && unit(&text[6..]).is_some_and(|second| (0xDC00..0xE000).contains(&second));
            Ok(if is_pair { 12 } else { 6 })
        }
        _ => Err(Unusual),
    }
}

/// What `\uXXXX` stands for.
fn unit(text: &[u8]) -> Option<u32> {
    text.get(2..6)?.iter().try_fold(0, |all, &byte| Some(all << 4 | char::from(byte).to_digit(16)?))
}

/// The length of a number or a word, and is it an integer.
fn scalar(text: &[u8]) -> Usual<(usize, bool)> {
    if !matches!(text.first(), Some(b't' | b'f' | b'n')) {
        return number(text);
    }
    let word = [&b"true"[..], b"false", b"null"].into_iter().find(|word| text.starts_with(word));
    word.map(|word| (word.len(), false)).ok_or(Unusual)
}

/// The length of a number, and is it an integer.
fn number(text: &[u8]) -> Usual<(usize, bool)> {
    let digits = |from: usize| text[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let sign = usize::from(text.first() == Some(&b'-'));
    let whole = if text.get(sign) == Some(&b'0') { 1 } else { digits(sign) };
    let mut length = sign + whole;
    let mut is_integer = true;
    if whole == 0 {
        return Err(Unusual);
    }
    if text.get(length) == Some(&b'.') {
        let count = digits(length + 1);
        if count > 0 {
            length += 1 + count;
            is_integer = false;
        }
    }
    if matches!(text.get(length), Some(b'e' | b'E')) {
        let signed = usize::from(matches!(text.get(length + 1), Some(b'+' | b'-')));
        let count = digits(length + 1 + signed);
        if count > 0 {
            length += 1 + signed + count;
            is_integer = false;
        }
    }
    if length > MOST_NUMBER || (is_integer && whole > MOST_DIGITS) {
        return Err(Unusual);
    }
    Ok((length, is_integer))
}
