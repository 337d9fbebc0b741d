//! What a Redis server keeps, and the commands that soloist sends or its scripts call.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Answer {
    Nil,
    Int(i64),
    Bulk(Vec<u8>),
    Status(&'static str),
    Error(String),
    List(Vec<Self>),
}

impl Answer {
    /// As RESP2 has it.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Nil => out.extend_from_slice(b"$-1\r\n"),
            Self::Int(n) => out.extend_from_slice(format!(":{n}\r\n").as_bytes()),
            Self::Status(text) => out.extend_from_slice(format!("+{text}\r\n").as_bytes()),
            Self::Error(text) => out.extend_from_slice(format!("-{text}\r\n").as_bytes()),
            Self::Bulk(bytes) => {
                out.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
                out.extend_from_slice(bytes);
                out.extend_from_slice(b"\r\n");
            }
            Self::List(all) => {
                out.extend_from_slice(format!("*{}\r\n", all.len()).as_bytes());
                all.iter().for_each(|a| a.write(out));
            }
        }
    }
}

type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

#[derive(Debug, Clone)]
enum Kept {
    Text(Vec<u8>),
    /// In the order of the first writing, as a small hash has it.
    Hash(Pairs),
    List(VecDeque<Vec<u8>>),
    Set(BTreeSet<Vec<u8>>),
}

#[derive(Debug, Clone, Default)]
pub(super) struct Data {
    keys: BTreeMap<Vec<u8>, (Kept, Option<i64>)>,
    /// The server's clock, Unix µs.
    pub(super) now_us: i64,
    pub(super) replid: String,
    /// Published and not yet sent: channel, message.
    pub(super) published: Pairs,
}

const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

fn bulk(bytes: &[u8]) -> Answer {
    Answer::Bulk(bytes.to_vec())
}

fn int(bytes: &[u8]) -> Option<i64> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

/// The places in a list of `len` items that a command names.
fn range(len: usize, from: &[u8], to: &[u8]) -> (i64, i64) {
    let place = |at: &[u8]| match int(at).unwrap_or(0) {
        n if n < 0 => n + len as i64,
        n => n,
    };
    (place(from).max(0), place(to))
}

impl Data {
    /// The keys of another copy, which is older.
    pub(super) fn replace_keys(&mut self, other: &Self) {
        self.keys.clone_from(&other.keys);
    }

    pub(super) fn clear(&mut self) {
        self.keys.clear();
    }

    /// All of a list.
    pub(super) fn all_of(&self, key: &str) -> Vec<Vec<u8>> {
        match self.keys.get(key.as_bytes()) {
            Some((Kept::List(all), _)) => all.iter().cloned().collect(),
            _ => vec![],
        }
    }

    fn get(&mut self, key: &[u8]) -> Option<&mut Kept> {
        let now = self.now_us / 1000;
        if self
            .keys
            .get(key)
            .is_some_and(|(_, until)| until.is_some_and(|u| u <= now))
        {
            self.keys.remove(key);
        }
        self.keys.get_mut(key).map(|(kept, _)| kept)
    }

    fn hash(&mut self, key: &[u8]) -> Result<&mut Pairs, Answer> {
        if self.get(key).is_none() {
            self.keys.insert(key.to_vec(), (Kept::Hash(vec![]), None));
        }
        match self.get(key) {
            Some(Kept::Hash(all)) => Ok(all),
            _ => Err(Answer::Error(WRONG_TYPE.to_owned())),
        }
    }

    fn list(&mut self, key: &[u8]) -> Result<&mut VecDeque<Vec<u8>>, Answer> {
        if self.get(key).is_none() {
            self.keys
                .insert(key.to_vec(), (Kept::List(VecDeque::new()), None));
        }
        match self.get(key) {
            Some(Kept::List(all)) => Ok(all),
            _ => Err(Answer::Error(WRONG_TYPE.to_owned())),
        }
    }

    /// A key without content does not exist.
    fn tidy(&mut self, key: &[u8]) {
        let empty = match self.keys.get(key) {
            Some((Kept::Hash(all), _)) => all.is_empty(),
            Some((Kept::List(all), _)) => all.is_empty(),
            Some((Kept::Set(all), _)) => all.is_empty(),
            _ => false,
        };
        if empty {
            self.keys.remove(key);
        }
    }

    pub(super) fn command(&mut self, words: &[Vec<u8>]) -> Answer {
        let answer = self.carry_out(words).unwrap_or_else(|refused| refused);
        if let Some(key) = words.get(1) {
            self.tidy(key);
        }
        answer
    }

    // Long: one arm for each command.
    fn carry_out(&mut self, words: &[Vec<u8>]) -> Result<Answer, Answer> {
        let name = words
            .first()
            .map(|w| w.to_ascii_uppercase())
            .unwrap_or_default();
        let args: Vec<&[u8]> = words.iter().skip(1).map(Vec::as_slice).collect();
        Ok(match (&*name, &args[..]) {
            (b"PING", []) => Answer::Status("PONG"),
            (b"CLIENT" | b"SELECT" | b"AUTH", _) => Answer::Status("OK"),
            (b"WAIT", _) => Answer::Int(0),
            (b"TIME", []) => {
                let (s, us) = (self.now_us.div_euclid(1_000_000), self.now_us.rem_euclid(1_000_000));
                Answer::List(vec![bulk(s.to_string().as_bytes()), bulk(us.to_string().as_bytes())])
            }
            (b"INFO", _) => bulk(
                format!(
                    "# Server\r\nredis_version:7.0.15\r\n# Memory\r\nmaxmemory_policy:noeviction\r\n\
                     # Replication\r\nrole:master\r\nmaster_replid:{}\r\n",
                    self.replid
                )
                .as_bytes(),
            ),
            (b"GET", [key]) => match self.get(key) {
                Some(Kept::Text(text)) => bulk(text),
                None => Answer::Nil,
                _ => Answer::Error(WRONG_TYPE.to_owned()),
            },
            (b"SET", [key, value, rest @ ..]) => {
                let for_ms = match rest {
                    [px, ms] if px.eq_ignore_ascii_case(b"PX") => int(ms),
                    _ => None,
                };
                let until = for_ms.map(|ms| self.now_us / 1000 + ms);
                self.keys.insert(key.to_vec(), (Kept::Text(value.to_vec()), until));
                Answer::Status("OK")
            }
            (b"DEL", keys) => {
                let gone = keys.iter().filter(|key| self.keys.remove(**key).is_some());
                Answer::Int(gone.count() as i64)
            }
            (b"PEXPIRE", [key, ms]) => {
                let until = self.now_us / 1000 + int(ms).unwrap_or(0);
                let kept = self.keys.get_mut(*key);
                Answer::Int(i64::from(kept.map(|kept| kept.1 = Some(until)).is_some()))
            }
            (b"PERSIST", [key]) => {
                let kept = self.keys.get_mut(*key);
                Answer::Int(i64::from(kept.is_some_and(|kept| kept.1.take().is_some())))
            }
            (b"PTTL", [key]) => {
                let now = self.now_us / 1000;
                match self.get(key).is_some().then(|| self.keys[*key].1) {
                    None => Answer::Int(-2),
                    Some(None) => Answer::Int(-1),
                    Some(Some(until)) => Answer::Int(until - now),
                }
            }
            (b"HSET", [key, pairs @ ..]) => {
                let all = self.hash(key)?;
                let mut new = 0;
                for pair in pairs.chunks_exact(2) {
                    match all.iter_mut().find(|(name, _)| name == pair[0]) {
                        Some((_, value)) => *value = pair[1].to_vec(),
                        None => {
                            new += 1;
                            all.push((pair[0].to_vec(), pair[1].to_vec()));
                        }
                    }
                }
                Answer::Int(new)
            }
            (b"HDEL", [key, names @ ..]) => {
                let all = self.hash(key)?;
                let before = all.len();
                all.retain(|(name, _)| !names.contains(&&name[..]));
                Answer::Int((before - all.len()) as i64)
            }
            (b"HGET", [key, name]) => {
                let found = self.hash(key)?.iter().find(|(n, _)| n == name);
                found.map_or(Answer::Nil, |(_, value)| bulk(value))
            }
            (b"HMGET", [key, names @ ..]) => {
                let all = self.hash(key)?;
                let value = |name: &&[u8]| all.iter().find(|(n, _)| n == name);
                let values = names.iter().map(|n| value(n).map_or(Answer::Nil, |(_, v)| bulk(v)));
                Answer::List(values.collect())
            }
            (b"HGETALL", [key]) => {
                let all = self.hash(key)?.iter();
                Answer::List(all.flat_map(|(n, v)| [bulk(n), bulk(v)]).collect())
            }
            (b"HLEN", [key]) => Answer::Int(self.hash(key)?.len() as i64),
            (b"HINCRBY", [key, name, by]) => {
                let all = self.hash(key)?;
                let by = int(by).unwrap_or(0);
                match all.iter_mut().find(|(n, _)| n == name) {
                    Some((_, value)) => {
                        let n = int(value).unwrap_or(0) + by;
                        *value = n.to_string().into_bytes();
                        Answer::Int(n)
                    }
                    None => {
                        all.push((name.to_vec(), by.to_string().into_bytes()));
                        Answer::Int(by)
                    }
                }
            }
            (b"LPUSH", [key, values @ ..]) => {
                let all = self.list(key)?;
                values.iter().for_each(|v| all.push_front(v.to_vec()));
                Answer::Int(all.len() as i64)
            }
            (b"RPOP", [key]) => self.list(key)?.pop_back().map_or(Answer::Nil, Answer::Bulk),
            (b"LTRIM", [key, from, to]) => {
                let all = self.list(key)?;
                let (from, to) = range(all.len(), from, to);
                let mut n = 0..;
                all.retain(|_| n.next().is_some_and(|n| from <= n && n <= to));
                Answer::Status("OK")
            }
            (b"LRANGE", [key, from, to]) => {
                let all = self.list(key)?;
                let (from, to) = range(all.len(), from, to);
                let some = (from..=to).filter_map(|n| all.get(n as usize));
                Answer::List(some.map(|v| bulk(v)).collect())
            }
            (b"SADD", [key, members @ ..]) => {
                if self.get(key).is_none() {
                    self.keys.insert(key.to_vec(), (Kept::Set(BTreeSet::new()), None));
                }
                match self.get(key) {
                    Some(Kept::Set(all)) => {
                        let new = members.iter().filter(|m| all.insert(m.to_vec()));
                        Answer::Int(new.count() as i64)
                    }
                    _ => Answer::Error(WRONG_TYPE.to_owned()),
                }
            }
            (b"SMEMBERS", [key]) => match self.get(key) {
                Some(Kept::Set(all)) => Answer::List(all.iter().map(|m| bulk(m)).collect()),
                None => Answer::List(vec![]),
                _ => Answer::Error(WRONG_TYPE.to_owned()),
            },
            (b"PUBLISH", [channel, message]) => {
                // No instance here serves HTTP, so none subscribes to the changes.
                if !channel.ends_with(b":changes") {
                    self.published.push((channel.to_vec(), message.to_vec()));
                }
                Answer::Int(1)
            }
            _ => {
                let name = String::from_utf8_lossy(&name);
                Answer::Error(format!("ERR unknown command '{name}' with {} arguments", args.len()))
            }
        })
    }
}
