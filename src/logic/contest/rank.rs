//! Which instance claims first.

use crate::{
    logic::claim::Target,
    model::{InstanceId, JobName},
};

/// The place of `me` in the order in which the live instances claim an occurrence. Every instance computes the same
/// order. `without`: an instance that is left out.
pub fn rank(
    live: &[InstanceId],
    me: &InstanceId,
    job: &JobName,
    target: &Target,
    without: Option<&InstanceId>,
) -> usize {
    let mut key = Vec::with_capacity(64);
    let mut weight = |id: &InstanceId| {
        key.clear();
        key.extend_from_slice(id.as_str().as_bytes());
        key.push(0);
        key.extend_from_slice(job.as_str().as_bytes());
        key.push(0);
        match target {
            Target::Scheduled(at) => key.extend_from_slice(&at.0.to_le_bytes()),
            Target::Manual { key: k, .. } => key.extend_from_slice(k.as_bytes()),
        }
        xxhash_rust::xxh3::xxh3_64(&key)
    };
    let ours = weight(me);
    let others = live.iter().filter(|id| *id != me && Some(*id) != without);
    others.filter(|id| weight(id) > ours).count()
}
