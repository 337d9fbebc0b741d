#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| soloist::fuzz::bounded(data));
