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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Occurrence;

    /// The order is the same in all versions of soloist, which may be mixed in a fleet.
    #[test]
    fn all_instances_agree_on_the_order() {
        let live = ["a", "b", "c"].map(InstanceId::new);
        let ranks = |job: &str, target: &Target, without: Option<usize>| {
            let without = without.map(|i| &live[i]);
            let job = JobName::new(job);
            [0, 1, 2].map(|i| rank(&live, &live[i], &job, target, without))
        };
        let at = |ms| Target::Scheduled(Occurrence(ms));
        let key = |key: &str| Target::Manual {
            key: key.to_owned(),
            before: None,
        };
        assert_eq!(ranks("draw", &at(1000), None), [1, 2, 0]);
        assert_eq!(ranks("draw", &at(2000), None), [2, 1, 0]);
        assert_eq!(ranks("mail", &at(1000), None), [2, 1, 0]);
        assert_eq!(ranks("draw", &key("k"), None), [2, 1, 0]);
        // Those behind the one that is left out move up.
        assert_eq!(ranks("draw", &at(1000), Some(0)), [1, 1, 0]);
        assert_eq!(ranks("draw", &at(1000), Some(1)), [1, 2, 0]);
        assert_eq!(ranks("draw", &at(1000), Some(2)), [0, 1, 0]);
    }
}
