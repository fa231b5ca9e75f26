//! The parser by itself: every event once, nothing lost, however the bytes are cut and whatever they are.
//!
//! `PUMP_FUZZ_CASES=10000000 cargo test --release --test parser fuzz` fuzzes for long; `PUMP_FUZZ_FIRST` is the first seed.
mod common;

use balanceroute_native::kept::Form;
use balanceroute_native::parser::{Kind, Parser, Reason, Scratch, Settings, MOST_CHUNK, MOST_KEPT};
use common::{
    chunk, counted_token, fed, last, named, number, payload, token, Draw, COUNTED, PLAIN, WITH_IDS,
};

fn once(settings: Settings, data: &[u8]) -> (Vec<u8>, Vec<u8>, Option<Reason>, Parser) {
    let (mut parser, mut out) = (Parser::new(settings, 0), Vec::new());
    let fed = parser.feed(data, &mut Scratch::default(), &mut out);
    let rest = parser.held().to_vec();
    (out, rest, fed.reason, parser)
}

#[test]
#[cfg_attr(miri, ignore)] // It takes minutes there.
fn a_stream_is_the_same_wherever_it_is_cut() {
    let events = [token("a"), token("b \\\"c\\\""), [token("d"), token("e")].concat(), token("f"), last()];
    let data: Vec<u8> = events.iter().flat_map(|event| chunk(event)).collect();
    for at in 1..data.len() {
        let mut sizes = [at, data.len()].into_iter();
        let (out, rest, events, parser) = fed(PLAIN, &data, &mut || sizes.next().unwrap_or(1));
        assert_eq!((events, parser.tokens()), (5, 5));
        assert_eq!(
            payload(&out).0,
            [token("a"), token("b \\\"c\\\""), token("d"), token("e"), token("f")].concat()
        );
        assert_eq!(rest, chunk(&last()));
    }
}

#[test]
fn what_one_piece_brings_is_one_chunk() {
    let both = [token("a"), token("b")].concat();
    let (out, rest, reason, _) = once(PLAIN, &[chunk(&token("a")), chunk(&token("b"))].concat());
    assert_eq!((out, rest, reason), (chunk(&both), vec![], None));
    let raw = Settings { chunked: false, ..PLAIN };
    assert_eq!(once(raw, &chunk(&both)).0, both);
}

#[test]
fn the_rest_of_a_chunk_becomes_a_chunk() {
    let data = [chunk(&[token("a"), last(), token("b")].concat()), b"5\r\nx".to_vec()].concat();
    let (out, rest, reason, _) = once(PLAIN, &data);
    assert_eq!((out, reason), (chunk(&token("a")), Some(Reason::Event)));
    assert_eq!(rest, [chunk(&[last(), token("b")].concat()), b"5\r\nx".to_vec()].concat());
}

#[test]
fn what_is_not_plain_is_left_as_it_is() {
    let body = token("a");
    let size = body.len();
    for (line, reason) in [
        (format!("{size:x};a=b\r\n"), Reason::Chunk),
        (format!("{size:x} \r\n"), Reason::Chunk),
        (format!("0000{size:x}\r\n"), Reason::Chunk),
        (format!("+{size:x}\r\n"), Reason::Chunk),
        (format!("{:x}\r\n", size - 1), Reason::Chunk),
        (format!("{size:x}\n"), Reason::Chunk),
        ("\r\n".into(), Reason::Chunk),
        ("0\r\n".into(), Reason::Chunk),
        (format!("{:x}\r\n", MOST_CHUNK + 1), Reason::Chunk),
    ] {
        let data = [chunk(&body), line.clone().into_bytes(), body.clone(), b"\r\n".to_vec()].concat();
        let (out, rest, found, _) = once(PLAIN, &data);
        assert_eq!((out, found), (chunk(&body), Some(reason)), "{line}");
        assert_eq!(rest, data[chunk(&body).len()..], "{line}");
    }
    let other = [
        last(),
        b": ping\n\n".to_vec(),
        b"\n".to_vec(),
        b"data: [DONE]\n\n".to_vec(),
        token("a").replace_line_ends(),
    ];
    for event in other {
        let (out, rest, found, _) = once(PLAIN, &chunk(&event));
        assert_eq!((out, rest), (vec![], chunk(&event)));
        assert!(matches!(found, Some(Reason::Event | Reason::Chunk)));
    }
}

trait LineEnds {
    fn replace_line_ends(self) -> Self;
}

impl LineEnds for Vec<u8> {
    fn replace_line_ends(self) -> Self {
        String::from_utf8(self).unwrap().replace('\n', "\r\n").into_bytes()
    }
}

#[test]
fn the_first_wrong_byte_of_a_size_is_enough() {
    for start in [&b"g"[..], b"5;", b"12345", b"5\n", b"\n", b"0\r"] {
        assert_eq!(once(PLAIN, start).2, Some(Reason::Chunk), "{start:?}");
    }
    for start in [&b"5"[..], b"5\r", b"5\r\n", b"ffff", b"0"] {
        assert_eq!((once(PLAIN, start).2, once(PLAIN, start).1), (None, start.to_vec()));
    }
}

#[test]
fn counts_are_read_and_cut_out() {
    let data = [chunk(&counted_token("a", 3, "null")), chunk(&counted_token("b", 7, "null"))].concat();
    let (out, rest, reason, parser) = once(COUNTED, &data);
    assert_eq!((payload(&out).0, rest, reason), ([token("a"), token("b")].concat(), vec![], None));
    assert_eq!(parser.tokens(), 7);
    let no_usage = Settings { hide: false, no_usage: true, ..COUNTED };
    assert_eq!(once(no_usage, &data).2, Some(Reason::Event));
}

#[test]
fn ids_are_kept_as_far_as_they_count() {
    let events = [
        counted_token("a", 1, "[11]"),
        counted_token("", 2, "[22]"),
        counted_token("b", 4, "[33,44]"),
        counted_token("c", 5, "[55]"),
        counted_token("", 6, "[66]"),
        counted_token("d", 8, "[77,88]"),
    ];
    let data: Vec<u8> = events.iter().flat_map(|event| chunk(event)).collect();
    for size in [1, 7, 200, data.len()] {
        let (out, rest, events, mut parser) = fed(WITH_IDS, &data, &mut || size);
        assert_eq!((events, rest), (6, vec![]));
        let shown = ["a", "", "b", "c", "", "d"].map(token).concat();
        assert_eq!(payload(&out).0, if size == data.len() { shown } else { payload(&out).0 });
        let ids = parser.ids.take();
        assert_eq!(ids.kept, b",11,22,33,44,55");
        assert_eq!((ids.new, ids.has_new), (b"66,77,88".to_vec(), true));
        let behind = String::from_utf8(ids.behind).unwrap();
        assert!(behind.ends_with("\n\n") && behind.contains("[77,88]") && !behind.contains("usage"));
        assert_eq!(parser.ids.size(), 0);
    }
}

#[test]
#[cfg_attr(miri, ignore)] // It takes minutes there.
fn no_more_is_kept_than_the_bound() {
    let settings = Settings { text: true, ..PLAIN };
    let event = token(&"\\n".repeat(15_000)); // Escaped: kept as a whole event.
    let data: Vec<u8> = chunk(&event).repeat(MOST_KEPT / event.len() + 2);
    let (_, rest, reason, mut parser) = once(settings, &data);
    assert_eq!(reason, Some(Reason::Limit));
    assert!(parser.transcript.size() <= MOST_KEPT);
    parser.transcript.take();
    let mut again = Vec::new();
    let mut next = Parser::new(settings, parser.tokens());
    assert_eq!(next.feed(&rest, &mut Scratch::default(), &mut again).reason, None);
}

fn drawn_settings(draw: &mut Draw) -> Settings {
    let kind = [Kind::Completion, Kind::Completion, Kind::Named, Kind::Generate][draw.below(4)];
    let completion = kind == Kind::Completion;
    Settings {
        kind,
        counted: completion && draw.one_in(2),
        hide: completion && draw.one_in(2),
        no_usage: completion && draw.one_in(6),
        chunked: true,
        ids: (kind != Kind::Named && draw.one_in(2)).then_some(if draw.one_in(2) {
            Form::Chat
        } else {
            Form::Completion
        }),
        ids_wait: completion && draw.one_in(4),
        text: kind != Kind::Named && draw.one_in(3),
    }
}

fn drawn_stream(kind: Kind, draw: &mut Draw) -> Vec<u8> {
    let texts = ["a", "", "\\\"", "\\n", "é", "},\\\"usage\\\":{", "]"];
    let ids = ["null", "[5]", "[5,6]", "[]", "[ ]", "5", "[[1]]", "[x]", "[-5]", "[ 5]"];
    let mut data = Vec::new();
    for count in 0..draw.below(12) {
        let mut body = Vec::new();
        for _ in 0..1 + usize::from(draw.one_in(4)) * draw.below(4) {
            let text = draw.of(&texts);
            body.extend(match draw.below(10) {
                0 => token(text),
                1 | 3..6 if kind == Kind::Named => named(text),
                2 => last(),
                _ => counted_token(text, count, draw.of(&ids)),
            });
        }
        data.extend(chunk(&body));
    }
    for _ in 0..draw.below(4) {
        if data.is_empty() {
            break;
        }
        let at = draw.below(data.len());
        match draw.below(4) {
            0 => data[at] = draw.below(256) as u8,
            1 => drop(
                data.splice(
                    at..at,
                    draw.of(&[
                        "\n",
                        "\r\n",
                        "\"usage\":{",
                        "],\"usage\":{\"prompt_tokens\":",
                        "\"token_ids\":[",
                        "}",
                        "\\",
                    ])
                    .bytes(),
                ),
            ),
            2 => data.truncate(at),
            _ => drop(data.drain(at..data.len().min(at + 9))),
        }
    }
    data
}

#[test]
fn fuzz() {
    let (first, cases) =
        (number("PUMP_FUZZ_FIRST", 0), number("PUMP_FUZZ_CASES", if cfg!(miri) { 60 } else { 20_000 }));
    let mut taken = 0;
    for seed in first..first + cases {
        let mut draw = Draw::new(seed);
        let settings = drawn_settings(&mut draw);
        let data = drawn_stream(settings.kind, &mut draw);
        let (whole, rest, events, one) = fed(settings, &data, &mut || usize::MAX >> 1);
        let largest = 1 + draw.below(300);
        let (cut, cut_rest, cut_events, mut other) = fed(settings, &data, &mut || 1 + draw.below(largest));
        // Cutting changes nothing.
        assert_eq!(
            (payload(&whole), events, one.tokens()),
            (payload(&cut), cut_events, other.tokens()),
            "seed {seed}"
        );
        assert_eq!(payload(&rest), payload(&cut_rest), "seed {seed}");
        assert_eq!(one.ids.kept, other.ids.take().kept, "seed {seed}");
        let changes = settings.hide || (settings.ids.is_some() && settings.kind == Kind::Completion);
        if !changes {
            // Nothing is lost, and nothing is there twice.
            let all = [payload(&whole).0, payload(&rest).0].concat();
            assert!(payload(&data).0.starts_with(&all) || payload(&data).0 == all, "seed {seed}");
            assert_eq!(payload(&data).1, payload(&rest).1, "seed {seed}");
        }
        taken += u64::from(events);
    }
    assert!(2 * taken >= cases, "{taken} events in {cases} cases");
}
