//! The engine's own count of tokens: read, and cut out of what the client gets.
//!
//! As `proxy/live/openai/token_counts.py` and `usage.py` do it, byte for byte.
#![forbid(unsafe_code)]

use crate::marks::{last, MARKS};
use memchr::memchr;

pub const NAME: &[u8] = b"\"usage\"";
const END: &[u8] = b"}}";
// Of vLLM 0.33, in all events but the last.
const NEWER_END: &[u8] = b"},\"kv_transfer_params\":null}";
const MOST_DIGITS: usize = 9;
const BLANK_LINE: &[u8] = b"\n\n";

/// What an event says of the tokens so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// This many, or nothing that can be read.
    Told(Option<u32>),
    /// No count is in it.
    Untold,
}

/// Appends what of an event, given without the blank line behind it, is the client's, with that line.
pub fn take_line(event: &[u8], hide: bool, out: &mut Vec<u8>) -> Count {
    let Some(begin) = last(&MARKS.place, event) else {
        return take_slowly(event, hide, out);
    };
    let end: &[u8] = if ends_plainly(event, begin, END) {
        b"}"
    } else if ends_plainly(event, begin, NEWER_END) {
        &NEWER_END[1..]
    } else {
        return take_slowly(event, hide, out);
    };
    if hide {
        out.extend_from_slice(&event[..=begin]);
        out.extend_from_slice(end);
    } else {
        out.extend_from_slice(event);
    }
    out.extend_from_slice(BLANK_LINE);
    let behind = last(&MARKS.count, event).map_or(event, |at| &event[at + MARKS.count.needle().len()..]);
    let digits = behind.iter().position(|one| matches!(one, b',' | b'}')).map_or(behind, |at| &behind[..at]);
    Count::Told(number(digits))
}

/// Whether a usage object without braces in it stands between `begin` and this end of the event.
fn ends_plainly(event: &[u8], begin: usize, end: &[u8]) -> bool {
    event.ends_with(end)
        && event.get(begin..event.len() - end.len()).is_some_and(|usage| memchr(b'}', usage).is_none())
}

fn number(digits: &[u8]) -> Option<u32> {
    if digits.is_empty() || digits.len() > MOST_DIGITS || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(digits.iter().fold(0, |sum, digit| sum * 10 + u32::from(digit - b'0')))
}

fn take_slowly(event: &[u8], hide: bool, out: &mut Vec<u8>) -> Count {
    let mark = out.len();
    out.extend_from_slice(event);
    out.extend_from_slice(BLANK_LINE);
    let Some((begin, end)) = find_usage(&out[mark..]) else {
        return Count::Untold;
    };
    let count = any_count(&out[mark + begin..mark + end]);
    if hide {
        let cut = without(&out[mark..], begin, end);
        out.truncate(mark);
        out.extend_from_slice(&cut);
    }
    count.map_or(Count::Untold, |told| Count::Told(Some(told)))
}

/// Where the usage object at the top of an event stands, its name included.
fn find_usage(event: &[u8]) -> Option<(usize, usize)> {
    MARKS.usage.find(event)?;
    let (mut found, mut name, mut depth) = (None, None, 0i64);
    let mut at = 0;
    while at < event.len() {
        let begin = at;
        at += 1;
        match event[begin] {
            b'"' => {
                at = string_end(event, at);
                if depth == 1 && &event[begin..at] == NAME && is_object(&event[at..]) {
                    name = Some(begin);
                }
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => {
                depth -= 1;
                if depth == 1 {
                    if let Some(begin) = name.take() {
                        found = Some((begin, at));
                    }
                }
            }
            _ => {}
        }
    }
    found
}

/// Where a string ends whose first quote stands before `at`; the end of the event if it has none.
fn string_end(event: &[u8], mut at: usize) -> usize {
    while at < event.len() {
        match event[at] {
            b'"' => return at + 1,
            b'\\' if at + 1 == event.len() => return at,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    at
}

fn is_object(value: &[u8]) -> bool {
    let Some(value) = trimmed(value).strip_prefix(b":") else { return false };
    trimmed(value).first() == Some(&b'{')
}

/// The first count in a usage object.
fn any_count(usage: &[u8]) -> Option<u32> {
    let name = &MARKS.count_name;
    name.find_iter(usage).find_map(|at| {
        let value = trimmed(&usage[at + name.needle().len()..]).strip_prefix(b":")?;
        let value = trimmed(value);
        let length = value.iter().take_while(|one| one.is_ascii_digit()).count();
        let bounded = value.get(length).is_none_or(|one| !is_word(*one));
        number(&value[..length]).filter(|_| bounded)
    })
}

fn without(event: &[u8], begin: usize, end: usize) -> Vec<u8> {
    let (head, tail) = (&event[..begin], &event[end..]);
    if let Some(before) = trimmed_end(head).strip_suffix(b",") {
        return [before, tail].concat();
    }
    let tail = trimmed(tail).strip_prefix(b",").map_or(tail, trimmed);
    [head, tail].concat()
}

fn is_word(one: u8) -> bool {
    one == b'_' || one.is_ascii_alphanumeric()
}

/// What Python calls white space in bytes.
pub fn is_blank(one: u8) -> bool {
    matches!(one, b' ' | b'\t'..=b'\r')
}

fn trimmed(bytes: &[u8]) -> &[u8] {
    let begin = bytes.iter().position(|one| !is_blank(*one)).unwrap_or(bytes.len());
    &bytes[begin..]
}

fn trimmed_end(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().rposition(|one| !is_blank(*one)).map_or(0, |at| at + 1);
    &bytes[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(event: &str, hide: bool) -> (String, Count) {
        let mut out = Vec::new();
        let count = take_line(event.as_bytes(), hide, &mut out);
        (String::from_utf8(out).unwrap(), count)
    }

    #[test]
    fn usage_is_cut_at_both_of_its_places() {
        let usual = "data: {\"choices\":[1],\"usage\":{\"prompt_tokens\":3,\"total_tokens\":7,\"completion_tokens\":4}}";
        assert_eq!(taken(usual, true), ("data: {\"choices\":[1]}\n\n".into(), Count::Told(Some(4))));
        assert_eq!(taken(usual, false), (format!("{usual}\n\n"), Count::Told(Some(4))));
        let newer = "data: {\"choices\":[1],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":12},\"kv_transfer_params\":null}";
        let cut = "data: {\"choices\":[1],\"kv_transfer_params\":null}\n\n";
        assert_eq!(taken(newer, true), (cut.into(), Count::Told(Some(12))));
    }

    #[test]
    fn usage_is_found_wherever_it_stands() {
        let first = "data: {\"usage\" : {\"a\":{},\"completion_tokens\": 9 },\"choices\":[{\"x\":\"\\\"usage\\\":{\"}]}";
        let cut = "data: {\"choices\":[{\"x\":\"\\\"usage\\\":{\"}]}\n\n";
        assert_eq!(taken(first, true), (cut.into(), Count::Told(Some(9))));
        let last = "data: {\"choices\":[], \"usage\":{\"completion_tokens\":2,\"d\":{}}}";
        assert_eq!(taken(last, true), ("data: {\"choices\":[]}\n\n".into(), Count::Told(Some(2))));
        let null = "data: {\"choices\":[],\"usage\":null}";
        assert_eq!(taken(null, true), (format!("{null}\n\n"), Count::Untold));
    }

    #[test]
    fn counts_that_no_answer_has_are_none() {
        for (digits, told) in [
            ("1234567890", None),
            ("-1", None),
            ("", None),
            ("007", Some(7)),
            ("999999999", Some(999_999_999)),
        ] {
            let event =
                format!("data: {{[],\"usage\":{{\"prompt_tokens\":3,\"completion_tokens\":{digits}}}}}");
            let mut out = Vec::new();
            assert_eq!(
                take_line(event.replace("{[", "{\"c\":[").as_bytes(), true, &mut out),
                Count::Told(told),
                "{digits}"
            );
        }
    }
}
