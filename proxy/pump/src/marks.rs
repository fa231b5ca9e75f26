//! What events are recognised by, made ready to be looked for.
#![forbid(unsafe_code)]

use memchr::memmem::Finder;
use std::sync::LazyLock;

pub struct Marks {
    pub going_on: Finder<'static>,
    pub role: Finder<'static>,
    pub usage: Finder<'static>,
    pub usage_object: Finder<'static>,
    pub place: Finder<'static>,
    pub count: Finder<'static>,
    pub count_name: Finder<'static>,
    pub ids: Finder<'static>,
    pub before_chat_ids: Finder<'static>,
    pub before_completion_ids: Finder<'static>,
    pub nothing: Finder<'static>,
    pub no_text: Finder<'static>,
    pub chat_text: Finder<'static>,
    pub completion_text: Finder<'static>,
    pub blank_line: Finder<'static>,
}

/// As vLLM writes them; none begins as it ends, so the last one is found by searching forwards.
pub static MARKS: LazyLock<Marks> = LazyLock::new(|| {
    Marks {
    // In every event of a token that is not the last of its sequence.
    going_on: Finder::new(b"\"finish_reason\":null"),
    role: Finder::new(b"\"delta\":{\"role\":"),
    usage: Finder::new(b"\"usage\""),
    usage_object: Finder::new(b"\"usage\":{"),
    place: Finder::new(b"],\"usage\":{\"prompt_tokens\":"),
    count: Finder::new(b"\"completion_tokens\":"),
    count_name: Finder::new(b"\"completion_tokens\""),
    ids: Finder::new(b"\"token_ids\":["),
    // What stands between a text and its ids.
    before_chat_ids: Finder::new(b"\"},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":["),
    before_completion_ids: Finder::new(
        b"\",\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null,\"prompt_token_ids\":null,\"token_ids\":[",
    ),
    nothing: Finder::new(b"\"delta\":{}"),
    no_text: Finder::new(b"\":\"\""),
    chat_text: Finder::new(b"\"delta\":{\"content\":\""),
    completion_text: Finder::new(b"\"index\":0,\"text\":\""),
    blank_line: Finder::new(b"\n\n"),
}
});

/// Where a mark stands last. To search forwards is quicker than backwards: the processor compares many bytes at once.
pub fn last(mark: &Finder<'_>, text: &[u8]) -> Option<usize> {
    mark.find_iter(text).last()
}
