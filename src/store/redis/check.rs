//! Checks from a server's INFO whether soloist can use it.

use super::super::{
    Problem,
    connection::{FULL, REPLICA, UNSAVED},
};

/// The oldest version whose scripts may ask for the time and for INFO before they write.
const OLDEST: (u32, u32) = (6, 2);

/// A replica that has not confirmed anything for longer than this, in seconds, is taken for gone, as Redis does by
/// itself (`min-replicas-max-lag`).
const LONGEST_LAG: u64 = 10;

/// The sections of a server's INFO that are looked at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sections<'a> {
    pub(crate) server: &'a str,
    pub(crate) memory: &'a str,
    pub(crate) replication: &'a str,
    pub(crate) persistence: &'a str,
}

/// The problems of a server. `min_replicas`: so many replicas must confirm each grant.
pub(crate) fn problems(info: Sections<'_>, min_replicas: u32) -> Vec<Problem> {
    let Sections { server, memory, .. } = info;
    let mut found = vec![];
    let mut add = |fatal, text: String| found.push(Problem { fatal, text });
    let (major, minor) = OLDEST;
    match field(server, "redis_version") {
        Some(text) => match version(text) {
            Some(v) if v >= OLDEST => {}
            Some(_) => add(
                true,
                format!("the server is Redis {text:.20}; {major}.{minor} or newer is needed"),
            ),
            None => add(false, unknown("version", text)),
        },
        None => add(false, unknown("version", "nothing")),
    }
    match field(memory, "maxmemory_policy") {
        Some("noeviction") => {}
        Some(policy) if policy.starts_with("allkeys-") => add(
            true,
            format!(
                "its maxmemory-policy is {policy:.40}: when the server is full it forgets which occurrences have run, \
                 and they run twice; set the policy to noeviction"
            ),
        ),
        Some(policy) if policy.starts_with("volatile-") => add(
            false,
            format!(
                "its maxmemory-policy is {policy:.40}: when the server is full it drops histories, outputs and \
                 decisions; set the policy to noeviction"
            ),
        ),
        Some(policy) => add(false, unknown("maxmemory-policy", policy)),
        None => add(false, unknown("maxmemory-policy", "nothing")),
    }
    if is_full(memory) {
        add(false, format!("{FULL}: until then it grants nothing"));
    }
    if field(info.persistence, "rdb_last_bgsave_status") == Some("err") {
        add(false, format!("{UNSAVED}: until then it grants nothing"));
    }
    if field(info.replication, "role") == Some("slave") {
        add(false, format!("{REPLICA}: until then it grants nothing"));
    }
    let have = replicas(info.replication);
    if have < min_replicas {
        add(
            true,
            format!(
                "only {have} of {min_replicas} replicas follow the server; connect replicas, or lower `min_replicas` \
                 in [store]"
            ),
        );
    }
    found
}

/// How many replicas follow the server, by lines such as `slave0:ip=...,port=...,state=online,offset=...,lag=0`.
fn replicas(replication: &str) -> u32 {
    let follows = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        name.strip_prefix("slave")?.parse::<u32>().ok()?;
        let of = |name: &str| {
            rest.trim_end()
                .split(',')
                .find_map(|f| f.strip_prefix(name))
        };
        let lag: u64 = of("lag=")?.parse().ok()?;
        Some(of("state=")? == "online" && lag <= LONGEST_LAG)
    };
    let all = replication
        .lines()
        .filter(|line| follows(line) == Some(true));
    all.count().try_into().unwrap_or(u32::MAX)
}

/// The server refuses commands that need memory, as it does with maxmemory-policy noeviction.
fn is_full(memory: &str) -> bool {
    let number = |name| field(memory, name).and_then(|n| n.parse::<u64>().ok());
    let counted = number("used_memory").unwrap_or(0);
    let counted = counted.saturating_sub(number("mem_not_counted_for_evict").unwrap_or(0));
    number("maxmemory").is_some_and(|most| most > 0 && counted > most)
}

fn unknown(what: &str, said: &str) -> String {
    format!(
        "cannot find out its {what}: INFO says {said:.40}; make sure that it is Redis 6.2 or newer with \
         maxmemory-policy noeviction"
    )
}

fn field<'t>(info: &'t str, name: &str) -> Option<&'t str> {
    info.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim_end)
}

/// The major and the minor version.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (fatal, a word of the text) of each problem.
    fn found(version: &str, policy: &str) -> Vec<(bool, String)> {
        let server = format!("# Server\r\nredis_version:{version}\r\nredis_mode:standalone\r\n");
        let memory = format!(
            "# Memory\r\nmaxmemory:0\r\nmaxmemory_human:0B\r\nmaxmemory_policy:{policy}\r\n"
        );
        let info = Sections {
            server: &server,
            memory: &memory,
            replication: "",
            persistence: "",
        };
        problems(info, 0)
            .into_iter()
            .map(|p| (p.fatal, p.text))
            .collect()
    }

    #[test]
    fn versions_from_6_2_on_without_eviction_are_fine() {
        for version in ["6.2.0", "6.2.14", "7.0.15", "7.2.4", "8.0.0", "10.0.1"] {
            assert_eq!(found(version, "noeviction"), [], "{version}");
        }
    }

    #[test]
    fn a_server_that_uses_more_than_it_may_is_full() {
        for (memory, full) in [
            ("used_memory:9\r\nmaxmemory:0\r\n", false),
            ("used_memory:9\r\nmaxmemory:9\r\n", false),
            ("used_memory:10\r\nmaxmemory:9\r\n", true),
            // Buffers of replicas and of the append-only file.
            (
                "used_memory:10\r\nmaxmemory:9\r\nmem_not_counted_for_evict:1\r\n",
                false,
            ),
            ("maxmemory:9\r\n", false),
        ] {
            assert_eq!(is_full(memory), full, "{memory}");
        }
        let text = "used_memory:10\r\nmaxmemory:9\r\nmaxmemory_policy:noeviction\r\n";
        let info = Sections {
            server: "redis_version:7.0.15\r\n",
            memory: text,
            replication: "",
            persistence: "",
        };
        let found = problems(info, 0);
        assert_eq!((found.len(), found[0].fatal), (1, false));
        assert!(found[0].text.starts_with(FULL), "{}", found[0].text);
    }

    #[test]
    fn what_must_not_be_relied_on_is_fatal_and_the_rest_a_warning() {
        for (version, policy, fatal, word) in [
            ("6.0.16", "noeviction", true, "6.0.16"),
            ("5.0.14", "noeviction", true, "6.2 or newer"),
            ("7.0.15", "allkeys-lru", true, "allkeys-lru"),
            ("7.0.15", "allkeys-lfu", true, "noeviction"),
            ("7.0.15", "allkeys-random", true, "allkeys-random"),
            ("7.0.15", "volatile-lru", false, "volatile-lru"),
            ("7.0.15", "volatile-ttl", false, "histories"),
            ("7.0.15", "future-policy", false, "future-policy"),
            ("unstable", "noeviction", false, "version"),
        ] {
            let problems = found(version, policy);
            let [(is_fatal, text)] = &problems[..] else {
                panic!("{version} {policy}: {problems:?}");
            };
            assert_eq!(*is_fatal, fatal, "{version} {policy}");
            assert!(text.contains(word), "{text}");
        }
        assert_eq!(found("5.0.14", "allkeys-lru").len(), 2);
        let nothing = Sections {
            server: "",
            memory: "",
            replication: "",
            persistence: "",
        };
        let silent: Vec<bool> = problems(nothing, 0).iter().map(|p| p.fatal).collect();
        assert_eq!(silent, [false, false]);
    }

    #[test]
    fn a_server_that_takes_no_writes_says_so() {
        let problems = |replication, persistence| {
            let info = Sections {
                server: "redis_version:7.0.15",
                memory: "maxmemory_policy:noeviction",
                replication,
                persistence,
            };
            problems(info, 0)
        };
        assert_eq!(
            problems("role:master\r\n", "rdb_last_bgsave_status:ok\r\n"),
            []
        );
        for (replication, persistence, said) in [
            ("role:slave\r\n", "", REPLICA),
            ("", "rdb_last_bgsave_status:err\r\n", UNSAVED),
        ] {
            let found = problems(replication, persistence);
            assert!(
                !found[0].fatal && found[0].text.starts_with(said),
                "{found:?}"
            );
        }
    }

    #[test]
    fn only_replicas_that_follow_the_server_count() {
        let replication = "# Replication\r\nrole:master\r\nconnected_slaves:4\r\n\
            slave0:ip=10.0.0.1,port=6379,state=online,offset=308,lag=0\r\n\
            slave1:ip=10.0.0.2,port=6379,state=online,offset=300,lag=10\r\n\
            slave2:ip=10.0.0.3,port=6379,state=online,offset=100,lag=11\r\n\
            slave3:ip=10.0.0.4,port=6379,state=wait_bgsave,offset=0,lag=0\r\n\
            slave_repl_offset:308\r\nmaster_replid:8b\r\n";
        assert_eq!(replicas(replication), 2);
        assert_eq!(
            replicas("connected_slaves:3\r\nslaveX:state=online,lag=0"),
            0
        );
        let info = Sections {
            server: "redis_version:7.0.15",
            memory: "maxmemory_policy:noeviction",
            replication,
            persistence: "",
        };
        assert_eq!(problems(info, 2), []);
        let found = problems(info, 3);
        assert!(
            found[0].fatal && found[0].text.contains("only 2 of 3 replicas"),
            "{found:?}"
        );
    }
}
