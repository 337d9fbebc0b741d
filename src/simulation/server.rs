//! The server: what it understands of the bytes that arrive, and what it answers.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use parking_lot::Mutex;

use super::{
    data::{Answer, Data},
    host::EPOCH_US,
    lua::Scripts,
    network::Net,
};
use crate::model::{JobName, RunRecord};

pub(super) struct Server {
    net: Arc<Mutex<Net>>,
    data: Rc<RefCell<Data>>,
    scripts: Scripts,
    /// Its clock is so far ahead of the truth, µs.
    pub(super) ahead_us: i64,
    lives: u32,
    pub(super) questions: u64,
}

impl Server {
    pub(super) fn new(net: &Arc<Mutex<Net>>) -> Self {
        let data = Rc::new(RefCell::new(Data::default()));
        let scripts = Scripts::new(&data).expect("Lua");
        let mut server = Self {
            net: net.clone(),
            data,
            scripts,
            ahead_us: 0,
            lives: 0,
            questions: 0,
        };
        server.another_id();
        server
    }

    fn another_id(&mut self) {
        self.lives += 1;
        self.data.borrow_mut().replid = format!("{:040x}", self.lives);
    }

    pub(super) fn copy(&self) -> Data {
        self.data.borrow().clone()
    }

    /// The records of a job.
    pub(super) fn history(&self, job: &JobName) -> Vec<RunRecord> {
        let all = self
            .data
            .borrow()
            .all_of(&format!("soloist:{{{job}}}:history"));
        let records = all
            .iter()
            .map(|text| serde_json::from_slice(text).expect("a record"));
        records.collect()
    }

    /// Starts again, with its data.
    pub(super) fn restart(&mut self) {
        self.another_id();
        self.scripts.forget();
        self.net.lock().reset(None);
    }

    /// Loses all data, without a restart.
    pub(super) fn flush(&mut self) {
        self.data.borrow_mut().clear();
    }

    /// Its data is replaced by an older copy.
    pub(super) fn roll_back(&mut self, to: &Data) {
        self.data.borrow_mut().replace_keys(to);
        self.restart();
    }

    pub(super) fn forget_scripts(&mut self) {
        self.scripts.forget();
    }

    /// Takes in what arrives before `until`, and answers.
    pub(super) fn step(&mut self, until: u64) {
        let arrived = self.net.lock().arrive_at_server(until);
        for (at, id, bytes) in arrived {
            let mut inbox = {
                let mut net = self.net.lock();
                let Some(conn) = net.conns.get_mut(&id) else {
                    continue;
                };
                let mut inbox = std::mem::take(&mut conn.inbox);
                inbox.extend(bytes);
                inbox
            };
            self.data.borrow_mut().now_us = EPOCH_US + self.ahead_us + (at / 1000) as i64;
            let mut done = 0;
            while let Some((words, length)) = parse(&inbox[done..]) {
                done += length;
                self.answer(at, id, &words);
            }
            inbox.drain(..done);
            if let Some(conn) = self.net.lock().conns.get_mut(&id) {
                conn.inbox = inbox;
            }
        }
    }

    fn answer(&mut self, at: u64, id: u64, words: &[Vec<u8>]) {
        self.questions += 1;
        let name = words
            .first()
            .map(|w| w.to_ascii_uppercase())
            .unwrap_or_default();
        let answer = match &*name {
            b"EVALSHA" => self.scripts.call(&words[1..]),
            b"SCRIPT" => match words.get(2) {
                Some(text) => self.scripts.load(&String::from_utf8_lossy(text)),
                None => Answer::Error("ERR wrong arguments".to_owned()),
            },
            b"SUBSCRIBE" => {
                let mut net = self.net.lock();
                if let Some(conn) = net.conns.get_mut(&id) {
                    conn.subscribed = true;
                }
                let channel = words.get(1).cloned().unwrap_or_default();
                Answer::List(vec![
                    Answer::Bulk(b"subscribe".to_vec()),
                    Answer::Bulk(channel),
                    Answer::Int(1),
                ])
            }
            b"PING" if self.net.lock().conns.get(&id).is_some_and(|c| c.subscribed) => {
                Answer::List(vec![Answer::Bulk(b"pong".to_vec()), Answer::Bulk(vec![])])
            }
            _ => self.data.borrow_mut().command(words),
        };
        let mut bytes = vec![];
        answer.write(&mut bytes);
        let mut net = self.net.lock();
        net.send_to_host(id, at, bytes);
        let published = std::mem::take(&mut self.data.borrow_mut().published);
        for (channel, message) in published {
            let words = [b"message".to_vec(), channel, message];
            let mut bytes = vec![];
            Answer::List(words.map(Answer::Bulk).into()).write(&mut bytes);
            let subscribers = net.conns.iter().filter(|(_, c)| c.subscribed);
            let subscribers: Vec<u64> = subscribers.map(|(id, _)| *id).collect();
            for id in subscribers {
                net.send_to_host(id, at, bytes.clone());
            }
        }
    }
}

/// The words of the first command, and how many bytes it has; None: it is not there in full.
fn parse(bytes: &[u8]) -> Option<(Vec<Vec<u8>>, usize)> {
    let line = |from: usize| {
        let end = bytes[from..].windows(2).position(|w| w == b"\r\n")? + from;
        let n: usize = std::str::from_utf8(&bytes[from + 1..end])
            .ok()?
            .parse()
            .ok()?;
        Some((n, end + 2))
    };
    let (count, mut at) = line(0)?;
    let mut words = vec![];
    for _ in 0..count {
        let (length, begin) = line(at)?;
        words.push(bytes.get(begin..begin + length)?.to_vec());
        at = begin + length + 2;
    }
    (at <= bytes.len()).then_some((words, at))
}
