//! Guesses the meaning of a misspelt word.

/// The name that `word` most probably means, if one is near enough.
pub fn nearest<'n>(word: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let plain = |s: &str| s.to_ascii_lowercase().replace(['-', ' '], "_");
    let word = plain(word);
    // Very long words are not typing errors, and computing the distance costs the product of the lengths.
    if word.is_empty() || word.len() > 64 {
        return None;
    }
    names
        .into_iter()
        .filter_map(|name| {
            let candidate = plain(name);
            let distance = strsim::damerau_levenshtein(&word, &candidate);
            let allowed = (word.len().max(candidate.len()) / 3).max(1);
            (distance <= allowed && distance < candidate.len()).then_some((distance, name))
        })
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}
