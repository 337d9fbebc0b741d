//! `overlap`: what a claim does where another run of its job is in the way.

use super::*;

/// Another run of the job may be in the way, or an attempt that is awaited: `overlap` says which of them gives way.
pub(super) fn apply(
    st: &mut State,
    c: &Claim,
    at: Occurrence,
    now: i64,
    effects: &mut Effects,
) -> Checked<()> {
    let skips = !c.is_manual() && c.overlap == Overlap::Skip;
    let overlapped = |l: &Last| l.from <= at.0 && at.0 < l.to;
    if skips && st.last.as_ref().is_some_and(overlapped) {
        return ControlFlow::Break(skip(st, c, at, now, effects));
    }
    if let Some(e) = st.open.first()
        && e.next_attempt.is_none()
        && e.is(c.observed.as_ref())
    {
        lapse(st, 0, c, now, effects);
    }
    let until_resumed = st.until_resumed(now);
    // More than one is open only if the policy was Allow before.
    while let Some(e) = st.open.first_mut() {
        let first = Answer::RunFirst(e.run.occurrence);
        match e.next_attempt {
            Some(next) if next.trigger == Trigger::Takeover => {
                return ControlFlow::Break(until_resumed.unwrap_or(first));
            }
            Some(next) if c.overlap == Overlap::Queue => {
                let wait_ms = next.at - now;
                return ControlFlow::Break(match wait_ms > 0 {
                    true => Answer::Later { wait_ms },
                    false => until_resumed.unwrap_or(first),
                });
            }
            // A pending retry gives way to a newer occurrence: its attempt would carry an older token.
            Some(_) => {
                st.open.remove(0);
            }
            None => {
                // Proof that the run was going on when this occurrence was due. Without it the run may be dead, and to
                // skip because of a dead run would lose this occurrence; or the run is overdue itself, and began after
                // this occurrence was due.
                let alive = e.run.granted_at <= at.0
                    && (e.renewed_at >= at.0 || c.holds.contains(&e.run.id));
                if skips && alive {
                    return ControlFlow::Break(skip(st, c, at, now, effects));
                }
                if c.overlap == Overlap::Replace && e.stop.is_none() {
                    e.stop = Some(StopRequest::Replaced);
                    effects.events.push(Event::Stop { job: c.job.clone() });
                }
                let e = e.clone();
                st.waiting = true;
                return ControlFlow::Break(Answer::Blocked(e));
            }
        }
    }
    ControlFlow::Continue(())
}

fn skip(st: &mut State, c: &Claim, at: Occurrence, now: i64, effects: &mut Effects) -> Answer {
    decide(st, c, at, now, unasked(Outcome::Skipped, OVERLAPS), effects)
}
