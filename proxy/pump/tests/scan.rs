//! Large bodies: what is found does not depend on where the reading stops, and nothing hostile gets further.
mod common;

use balanceroute_native::scan::*;
use balanceroute_native::{br_scan, BrBytes};
use common::{number, Draw};
use std::ptr::{null, null_mut};

const PROMPTS: &[u8] = b"messages\0prompt\0";
const DATA_MEMBERS: &[u8] = b"data\0url\0";

fn bytes(of: &[u8]) -> BrBytes {
    BrBytes { data: of.as_ptr(), len: of.len() }
}

fn scan() -> Box<Scan> {
    Box::new(Scan {
        prompts: bytes(PROMPTS),
        data_members: bytes(DATA_MEMBERS),
        most_containers: 100,
        most_strings: 100,
        most_levels: 9,
        most_key: 400,
        at: 0,
        next: 0,
        depth: 0,
        containers: 0,
        strings: 0,
        is_data: 0,
        n_members: 0,
        n_summaries: 0,
        is_prompt: 0,
        reserved: 0,
        summaries: [Summary::default(); 4],
        members: [[0; 4]; MOST_MEMBERS],
        stack: [0; MOST_LEVELS],
    })
}

/// What a scan has found.
fn told(scan: &Scan) -> (Vec<Member>, Vec<[u64; 9]>) {
    let members = scan.members[..scan.n_members as usize].to_vec();
    let summaries = scan.summaries[..scan.n_summaries as usize].iter().map(|one| {
        let counts = [one.member, one.texts, one.integers, one.arrays, one.objects, one.data_strings];
        let mut all = [one.characters, one.inner, u64::from(one.n_heads), 0, 0, 0, 0, 0, 0];
        for (place, count) in all[3..].iter_mut().zip(counts) {
            *place = u64::from(count);
        }
        all
    });
    (members, summaries.collect())
}

fn read(data: &[u8], mut work: impl FnMut() -> usize) -> (Outcome, Box<Scan>) {
    let mut scan = scan();
    let names = Names { prompts: PROMPTS, data_members: DATA_MEMBERS };
    for _ in 0..=2 * data.len() + 2 {
        match advance(&mut scan, names, data, work()) {
            Outcome::More => assert!(scan.at as usize <= data.len()),
            outcome => return (outcome, scan),
        }
    }
    panic!("no end of {data:?}");
}

#[test]
fn members_and_counts() {
    let text = r#" {"model": "m", "messages" : [{"role": "user", "content": "é\n\ud83e\udd99\ud83e"},
        {"url": ["x", {"text": "y"}]}, "z"], "n": -1.5e3, "prompt": [1, 22,[3 ,"a"]], "tools": [null, {}]}  "#;
    let (outcome, scan) = read(text.as_bytes(), || usize::MAX);
    assert_eq!(outcome, Outcome::Complete);
    let (members, summaries) = told(&scan);
    let names: Vec<_> = members.iter().map(|one| &text[one[0] as usize + 1..one[1] as usize]).collect();
    assert_eq!(names, ["model", "messages", "n", "prompt", "tools"]);
    let values = |number: usize| &text[members[number][2] as usize..members[number][3] as usize];
    assert_eq!(values(0), "\"m\"");
    assert_eq!(values(2), "-1.5e3");
    assert_eq!(values(3), "[1, 22,[3 ,\"a\"]]");
    assert_eq!(values(4), "[null, {}]");
    // "user" and the four characters of the content, "y", "z"; the string behind `url` is data.
    assert_eq!(summaries[0], [4 + 4 + 1 + 1, 0, 2, 1, 1, 0, 0, 2, 1]);
    assert_eq!(summaries[1], [1, 2, 1, 3, 0, 2, 1, 0, 0]);
    let heads = scan.summaries[0].heads.map(|[begin, end]| &text[begin as usize..end as usize]);
    assert_eq!(heads[1], r#"{"url": ["x", {"text": "y"}]}"#);
}

#[test]
fn unusual() {
    for text in [
        "",
        "[]",
        "{",
        "{}x",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{\"a\":01}",
        "{\"a\":-}",
        "{\"a\":1.}",
        "{\"a\":[1,]}",
        "{\"a\":[,1]}",
        "{\"a\":tru}",
        "{\"a\":NaN}",
        "{\"a\":\"x}",
        "{\"a\":\"\u{1}\"}",
        "{\"a\":\"\\x\"}",
        "{\"a\":\"\\u12g4\"}",
        "{\"\\u0061\":1}",
        "{\"prompt\":[{\"\\u0061\":1}]}",
        "{\"prompt\":[1.5]}",
        "{\"a\":[}",
        "{\"a\":{]}",
        "{\"prompt\":\"\\",
        "{\"a\":\"\\u",
        "{\"a\":1e}",
    ] {
        assert_eq!(read(text.as_bytes(), || usize::MAX).0, Outcome::Unusual, "{text}");
    }
    for (inner, outcome) in [(8, Outcome::Complete), (9, Outcome::Unusual)] {
        let text = format!("{{\"a\":{}{}}}", "[".repeat(inner), "]".repeat(inner));
        assert_eq!(read(text.as_bytes(), || usize::MAX).0, outcome);
    }
    for (length, outcome) in [(398, Outcome::Complete), (399, Outcome::Unusual)] {
        let text = format!("{{\"{}\":1}}", "k".repeat(length));
        assert_eq!(read(text.as_bytes(), || usize::MAX).0, outcome);
    }
    let many = |count: usize| (0..count).map(|one| format!("\"{one}\":1")).collect::<Vec<_>>().join(",");
    for (count, outcome) in [(100, Outcome::Complete), (101, Outcome::Unusual)] {
        assert_eq!(read(format!("{{{}}}", many(count)).as_bytes(), || usize::MAX).0, outcome);
    }
}

/// Draws a body of pieces that fit together more often than not.
fn drawn(draw: &mut Draw, out: &mut Vec<u8>, levels: usize) {
    let names = ["messages", "prompt", "data", "url", "role", "é", ""];
    let texts = [
        "a",
        "é",
        "数据",
        "ह",
        "\u{d7ff}",
        "п",
        "🦙",
        "\u{10ffff}",
        "\\n",
        "\\\"",
        "\\ud83e\\udd99",
        "\\ud83e",
        "\x7f",
        "yyyyyyyyyyyyyyyyyyyyy",
    ];
    let spaces = ["", "", " ", "\n\t "];
    out.extend(draw.of(&spaces).as_bytes());
    match draw.below(if levels == 0 { 3 } else { 5 }) {
        0 => {
            out.push(b'"');
            for _ in 0..draw.below(30) {
                out.extend(draw.of(&texts).as_bytes());
            }
            out.push(b'"');
        }
        1 => out.extend(draw.of(&["0", "-1", "1.5", "1e9", "1234567", "true", "null"]).as_bytes()),
        2 => out.extend(b"[1,2, 3,44 ]"),
        3 => {
            out.push(b'[');
            for number in 0..draw.below(5) {
                if number > 0 {
                    out.push(b',');
                }
                drawn(draw, out, levels - 1);
            }
            out.push(b']');
        }
        _ => {
            out.push(b'{');
            for number in 0..draw.below(4) {
                if number > 0 {
                    out.extend(b", ");
                }
                out.extend(format!("\"{}\":", draw.of(&names)).as_bytes());
                drawn(draw, out, levels - 1);
            }
            out.push(b'}');
        }
    }
    out.extend(draw.of(&spaces).as_bytes());
}

#[test]
fn fuzz() {
    let mut complete = 0;
    let cases = number("PUMP_FUZZ_CASES", if cfg!(miri) { 40 } else { 40_000 });
    let first = number("PUMP_FUZZ_FIRST", 0);
    for seed in first..first + cases {
        let mut draw = Draw::new(seed);
        let mut data = b"{\"messages\":".to_vec();
        drawn(&mut draw, &mut data, 4);
        data.extend(b",\"tools\":");
        drawn(&mut draw, &mut data, 3);
        data.push(b'}');
        if draw.one_in(2) {
            for _ in 0..=draw.below(3) {
                let at = draw.below(data.len());
                data[at] = *draw
                    .of(&[b"\"", b"\\", b"{", b"]", b",", b"\xff", b"\xe6", b"\0", b"0"])
                    .first()
                    .unwrap();
            }
        }
        if draw.one_in(9) {
            data.truncate(draw.below(data.len()));
        }
        let (outcome, whole) = read(&data, || usize::MAX);
        let (again, sliced) = read(&data, || 1 + draw.below(40));
        assert_eq!(outcome, again, "seed {seed}: {data:?}");
        if outcome == Outcome::Complete {
            assert_eq!(told(&whole), told(&sliced), "seed {seed}: {data:?}");
            complete += 1;
        }
    }
    assert!(complete > cases / 5, "{complete}");
}

#[test]
fn the_c_interface() {
    let mut one = scan();
    let data = b"{\"a\": [1, 2]}";
    unsafe {
        assert_eq!(br_scan(null_mut(), data.as_ptr(), data.len(), 1), -libc::EINVAL);
        assert_eq!(br_scan(&mut *one, null(), 0, 1), -libc::EINVAL);
        assert_eq!(br_scan(&mut *one, data.as_ptr(), data.len(), 2), 0);
        assert_eq!(br_scan(&mut *one, data.as_ptr(), data.len(), 99), 1);
        assert_eq!(one.members[0], [1, 3, 6, 12]);
        // What no call left is refused, or is unusual; it harms nobody.
        for (next, depth, at) in [(7, 0, 3), (4, 1_024, 1), (99, 1, 1), (3, 5, 1), (4, u32::MAX, 7)] {
            let mut odd = scan();
            (odd.next, odd.depth, odd.at, odd.n_members) = (next, depth, at, 1_000);
            let said = br_scan(&mut *odd, data.as_ptr(), data.len(), 99);
            assert!(said == Outcome::Unusual as i32 || said == -libc::EIO, "{said}");
        }
    }
}
