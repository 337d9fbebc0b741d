-- read_output.lua: returns a part of the output of a run.
--
-- KEYS[1]  output  <ns>:{<job>}:output:<run>   hash, see pieces.lua
-- ARGV[1]  from    the first byte to return
-- ARGV[2]  most    the most bytes to return
--
-- Returns  {now_us, incarnation}                                                     the store has no output of it
--          {now_us, incarnation, from, data, stop, done, coming, total or stop, marks}   done, coming: 0 or 1
local o = load_output(KEYS[1])
if not o then return { int(now_us), incarnation } end
local from = math.min(math.max(tonumber(ARGV[1]), o.base), o.stop)
local stop = math.min(o.stop, from + tonumber(ARGV[2]))
local parts = {}
for n = math.floor(from / PIECE), math.floor((stop - 1) / PIECE) do
  local begin = math.max(n * PIECE, o.start)
  local piece = redis.call('HGET', KEYS[1], 'p' .. int(n)) or ''
  parts[#parts + 1] = string.sub(piece, math.max(from - begin, 0) + 1, stop - begin)
end
local given_up = o.total and now > o.patience
return { int(now_us), incarnation, int(from), table.concat(parts), int(o.stop), (o.done or given_up) and 1 or 0,
  (o.total and not o.done and not given_up) and 1 or 0, int(o.total or o.stop),
  redis.call('HGET', KEYS[1], 'marks') or '' }
