-- output.lua: adds to the output of a run; the newest bytes stay.
--
-- KEYS[1]  output  <ns>:{<job>}:output:<run>   hash, see pieces.lua
-- ARGV[1]  at      the number of bytes that the run wrote before `data`
-- ARGV[2]  data
-- ARGV[3]  keep    the number of bytes to keep
-- ARGV[4]  marks   which bytes came from stderr, or empty: `Marks` in src/model/marks.rs
--
-- Returns  {now_us, incarnation}
local o = load_output(KEYS[1])
local at, data, keep = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
if o and o.done then return { int(now_us), incarnation } end
o = o or { start = at, base = at, stop = at }
if at > o.stop then
  -- Bytes are missing before `data`: drop all earlier ones.
  drop_pieces(KEYS[1], math.floor(o.start / PIECE), math.floor(o.stop / PIECE))
  o.start, o.base, o.stop = at, at, at
end
-- An older request that is repeated knows less.
if ARGV[4] ~= '' and at + #data >= o.stop then redis.call('HSET', KEYS[1], 'marks', ARGV[4]) end
put_pieces(KEYS[1], o, string.sub(data, o.stop - at + 1))
o.base = math.max(o.base, o.stop - keep)
local first, last = math.floor(o.start / PIECE), math.floor(o.base / PIECE)
if last > first then
  drop_pieces(KEYS[1], first, last - 1)
  o.start = last * PIECE
end
save_output(KEYS[1], o)
return { int(now_us), incarnation }
