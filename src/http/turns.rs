//! Lets what takes time, the begin of an answer or a piece of a list, happen once in each turn of HTTP's one thread, so
//! that everything else is answered in between.

use tokio::{sync::Mutex, task::yield_now};

/// Without them hundreds of connections, with requests in advance on each, would all have their answers written before
/// the thread looks at its sockets again.
#[derive(Default)]
pub(super) struct Turns(Mutex<()>);

impl Turns {
    /// Waits until everybody who asked before had a turn, and the runtime has looked at its sockets since.
    ///
    /// The next one gets the turn whether or not it looks. So only who is woken, and then goes on, may wait here. A
    /// connection does: hyper asks for a piece only while there is room for it, and writes nothing else meanwhile.
    pub(super) async fn mine(&self) {
        let _turn = self.0.lock().await;
        yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering::Relaxed},
        },
        time::Duration,
    };

    use axum::{
        body::{Body, Bytes},
        response::Response,
    };
    use futures_util::stream;
    use hyper::{server::conn::http1, service::service_fn};
    use hyper_util::rt::TokioIo;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, duplex},
        net::UnixStream,
        time::{sleep, timeout},
    };

    use super::*;

    /// With 40 connections of 20 requests each, what arrives on a socket during the fifth is seen before the tenth.
    #[tokio::test]
    async fn what_arrives_is_seen_between_requests_that_wait() {
        let turns = Arc::new(Turns::default());
        let begun = Arc::new(AtomicUsize::new(0));
        let (mut client, mut served) = UnixStream::pair().expect("a pair of sockets");
        let at = begun.clone();
        let seen = tokio::spawn(async move {
            served.read_u8().await.expect("a byte");
            at.load(Relaxed)
        });
        // It waits for the byte.
        yield_now().await;
        let (sent, mut send) = tokio::sync::mpsc::channel(1);
        let sender = tokio::spawn(async move {
            send.recv().await;
            client.write_u8(1).await.expect("there is room");
        });
        for _ in 0..40 {
            let (turns, begun, sent) = (turns.clone(), begun.clone(), sent.clone());
            tokio::spawn(async move {
                for _ in 0..20 {
                    turns.mine().await;
                    if begun.fetch_add(1, Relaxed) == 4 {
                        sent.try_send(()).expect("it waits");
                    }
                }
            });
        }
        sender.await.expect("it was sent");
        let seen = seen.await.expect("it was seen");
        assert!((5..10).contains(&seen), "{seen} requests had begun");
    }

    /// Each connection is stuck at another place of an answer: its client asked for many, and takes none.
    #[tokio::test(start_paused = true)]
    async fn whoever_takes_nothing_keeps_no_turn() {
        let turns = Arc::new(Turns::default());
        let mut clients = vec![];
        for n in 0..40 {
            let (mut client, served) = duplex(1 << 16);
            let asked = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(20);
            client.write_all(asked.as_bytes()).await.expect("room");
            let turns = turns.clone();
            let service = service_fn(move |_: hyper::Request<hyper::body::Incoming>| {
                let turns = turns.clone();
                async move {
                    turns.mine().await;
                    let pieces = stream::unfold((turns, n % 7), |(turns, left)| async move {
                        let after = usize::checked_sub(left, 1)?;
                        turns.mine().await;
                        let piece = Bytes::from(vec![b'x'; 5_000 + 1_000 * left]);
                        Some((Ok::<_, Infallible>(piece), (turns, after)))
                    });
                    Ok::<_, Infallible>(Response::new(Body::from_stream(pieces)))
                }
            });
            let mut http = http1::Builder::new();
            http.max_buf_size(16 << 10);
            tokio::spawn(http.serve_connection(TokioIo::new(served), service));
            clients.push(client);
        }
        // Time passes only once nobody can go on.
        sleep(Duration::from_secs(1)).await;
        let turn = timeout(Duration::from_secs(1), turns.mine()).await;
        turn.expect("a turn");
        // Whoever takes its answers gets the others.
        let mut last = clients.pop().expect("one");
        let mut taken = vec![];
        let all = async {
            while !taken.ends_with(b"x\r\n0\r\n\r\n") {
                last.read_buf(&mut taken).await.expect("more");
            }
        };
        timeout(Duration::from_secs(1), all)
            .await
            .expect("the rest");
    }
}
