-- output.lua: add to the output of a running command; the newest bytes stay. The same as `splice` in src/store.rs.
--
-- KEYS[1]  output  <ns>:{<job>}:output:<run>   hash: base (bytes before `data`), data, done; expires
-- ARGV[1]  at      bytes written before these   ARGV[2] data   ARGV[3] keep: bytes
--
-- Returns  {now_us, inc}
local OUTPUT_TTL = '604800000' -- milliseconds
local o = redis.call('HMGET', KEYS[1], 'base', 'data', 'done')
if o[3] then return { int(now_us), inc } end
local at, keep = tonumber(ARGV[1]), tonumber(ARGV[3])
local base, data = tonumber(o[1] or ARGV[1]), o[2] or ''
if at > base + #data then base, data = at, '' end
local known = base + #data - at
data = data .. string.sub(ARGV[2], known + 1)
if #data > keep then
  base = base + #data - keep
  data = string.sub(data, -keep)
end
redis.call('HSET', KEYS[1], 'base', int(base), 'data', data)
redis.call('PEXPIRE', KEYS[1], OUTPUT_TTL)
return { int(now_us), inc }
