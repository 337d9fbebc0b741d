-- lines.lua: the newest lines of a job's history or decisions. Changes nothing.
--
-- KEYS[1]  list    <ns>:{<job>}:history or <ns>:{<job>}:decisions
-- ARGV[1]  lines   at most   ARGV[2] most: bytes of a line; a larger one is told as an empty one
--
-- Returns  {now_us, incarnation, line...}
local out = { int(now_us), incarnation }
for i, line in ipairs(redis.call('LRANGE', KEYS[1], 0, ARGV[1] - 1)) do
  out[i + 2] = #line <= tonumber(ARGV[2]) and line or ''
end
return out
