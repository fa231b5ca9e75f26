//! What the tests draw, and the streams that they send.
#![allow(dead_code)] // Each test file uses a part.

use balanceroute_native::kept::Form;
use balanceroute_native::parser::{Kind, Parser, Scratch, Settings};

/// A seeded generator (xorshift64*).
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }

    pub fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    pub fn of<'a, T: ?Sized>(&mut self, all: &[&'a T]) -> &'a T {
        all[self.below(all.len())]
    }
}

pub const PLAIN: Settings = Settings::plain(Kind::Completion);
pub const COUNTED: Settings = Settings { counted: true, hide: true, ..PLAIN };
pub const WITH_IDS: Settings = Settings { ids: Some(Form::Chat), ..COUNTED };

pub fn token(text: &str) -> Vec<u8> {
    let choice = format!("{{\"delta\":{{\"content\":\"{text}\"}},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}}");
    format!("data: {{\"id\":\"c\",\"choices\":[{choice}]}}\n\n").into_bytes()
}

pub fn counted_token(text: &str, tokens: usize, ids: &str) -> Vec<u8> {
    let choice = format!("{{\"delta\":{{\"content\":\"{text}\"}},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":{ids}}}");
    let usage = format!("{{\"prompt_tokens\":3,\"total_tokens\":9,\"completion_tokens\":{tokens}}}");
    format!("data: {{\"id\":\"c\",\"choices\":[{choice}],\"usage\":{usage}}}\n\n").into_bytes()
}

pub fn named(text: &str) -> Vec<u8> {
    let delta = format!("{{\"type\":\"text_delta\",\"text\":\"{text}\"}}");
    let data = format!("{{\"type\":\"content_block_delta\",\"delta\":{delta},\"index\":0}}");
    format!("event: content_block_delta\ndata: {data}\n\n").into_bytes()
}

pub fn last() -> Vec<u8> {
    b"data: {\"id\":\"c\",\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n".to_vec()
}

pub fn chunk(payload: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", payload.len()).as_bytes(), payload, b"\r\n"].concat()
}

/// The payload of chunks that are whole, and what stands behind them.
pub fn payload(mut data: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let mut found = Vec::new();
    while let Some(line) = data.windows(2).position(|two| two == b"\r\n") {
        let Some(size) =
            std::str::from_utf8(&data[..line]).ok().and_then(|digits| usize::from_str_radix(digits, 16).ok())
        else {
            break;
        };
        let Some(whole) = data.get(line + 2..line + 2 + size) else { break };
        if size == 0 || data.get(line + 2 + size..line + 4 + size) != Some(b"\r\n") {
            break;
        }
        found.extend_from_slice(whole);
        data = &data[line + 4 + size..];
    }
    (found, data.to_vec())
}

/// Everything that came of a stream in segments: the client's bytes, the rest, and events.
pub fn fed(
    settings: Settings,
    data: &[u8],
    sizes: &mut dyn FnMut() -> usize,
) -> (Vec<u8>, Vec<u8>, u32, Parser) {
    let mut parser = Parser::new(settings, 0);
    let (mut scratch, mut out, mut events, mut at) = (Scratch::default(), Vec::new(), 0, 0);
    while at < data.len() {
        let end = data.len().min(at + sizes().max(1));
        let fed = parser.feed(&data[at..end], &mut scratch, &mut out);
        events += fed.events;
        at = end;
        if fed.reason.is_some() {
            break;
        }
    }
    let rest = [parser.held(), &data[at..]].concat();
    (out, rest, events, parser)
}

/// Reads a number from the environment.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}
