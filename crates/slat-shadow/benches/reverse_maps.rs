//! What reverse maps cost: nanoseconds to add, remove and visit an entry, and bytes for each, at several lengths.
//!
//! `cargo bench -p slat-shadow --bench reverse_maps`. Medians of rounds, caches hot: a few reverse maps are filled,
//! visited and emptied again and again. Beside each entry its position is kept, as a shadow page keeps it, and looking
//! it up and changing it is part of the time.
#![allow(missing_docs)]

use std::hint::black_box;
use std::time::Instant;

use slat_shadow::rmap::{Chains, EntryRef, Head, ReverseMaps};

const LENGTHS: [usize; 6] = [1, 2, 8, 15, 100, 500];
const ROUNDS: usize = 301;
/// Entries of all reverse maps of a round together.
const ENTRIES: usize = 2000;

/// Reverse maps, and what the owner of each entry remembers.
struct Maps {
    chains: Chains,
    heads: Vec<Head>,
    length: usize,
    /// The position of each entry, by its page, in a word with its frame.
    words: Vec<u64>,
}

impl Maps {
    fn new(length: usize) -> Self {
        let heads: Vec<Head> = (0..ENTRIES / length).map(|_| Head::default()).collect();
        let words = vec![0; heads.len() * length];
        Self { chains: Chains::default(), heads, length, words }
    }

    /// Processes map a page at the same index of tables of their own.
    fn entry(page: usize) -> EntryRef {
        EntryRef::new(page as u32, 5).expect("few pages")
    }

    fn fill(&mut self) {
        for (head, map) in self.heads.iter_mut().enumerate() {
            for page in head * self.length..(head + 1) * self.length {
                let position = self.chains.add(map, Self::entry(page)).expect("memory");
                self.words[page] = (head as u64) << 12 | position as u64;
            }
        }
    }

    fn remove(&mut self, pages: &[usize]) {
        for &page in pages {
            let word = self.words[page];
            let (head, position) = ((word >> 12) as usize, word as usize & 0xfff);
            if let Some(moved) =
                self.chains.remove(&mut self.heads[head], Self::entry(page), position)
            {
                let word = &mut self.words[moved.page() as usize];
                *word = *word & !0xfff | position as u64;
            }
        }
    }

    fn visit(&self) -> u64 {
        let mut sum = 0;
        for head in &self.heads {
            head.for_each(|entry| sum += u64::from(entry.page()));
        }
        sum
    }
}

/// Nanoseconds that `work` takes.
fn time(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_nanos() as f64
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// All pages, the order of each reverse map's shuffled.
fn shuffled(length: usize, all: usize) -> Vec<usize> {
    let mut pages: Vec<usize> = (0..all).collect();
    let mut state = 88172645463325252u64;
    for map in pages.chunks_mut(length) {
        for n in (1..map.len()).rev() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            map.swap(n, (state % (n as u64 + 1)) as usize);
        }
    }
    pages
}

fn main() {
    println!("entries    add  oldest  newest  random   visit  bytes/entry");
    for length in LENGTHS {
        let mut maps = Maps::new(length);
        let all = maps.words.len();
        let oldest: Vec<usize> = (0..all).collect();
        let newest: Vec<usize> = oldest.iter().rev().copied().collect();
        let random = shuffled(length, all);
        let mut times = [const { Vec::new() }; 5];
        let mut bytes = 0;
        for _ in 0..ROUNDS {
            for (order, pages) in [&oldest, &newest, &random].into_iter().enumerate() {
                times[0].push(time(|| maps.fill()));
                bytes = maps.chains.bytes();
                times[4].push(time(|| {
                    black_box(maps.visit());
                }));
                times[1 + order].push(time(|| maps.remove(pages)));
            }
        }
        let [add, oldest, newest, random, visit] =
            times.map(|mut times| median(&mut times) / all as f64);
        println!(
            "{length:>7} {add:>6.2} {oldest:>7.2} {newest:>7.2} {random:>7.2} {visit:>7.2} {:>12.1}",
            bytes as f64 / all as f64
        );
    }
}
