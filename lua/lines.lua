-- lines.lua: returns the newest lines of a job's history or decisions. Changes nothing.
--
-- KEYS[1]  list    <ns>:{<job>}:history or <ns>:{<job>}:decisions
-- ARGV[1]  lines   the most lines to return
-- ARGV[2]  most    the most bytes of a line; a longer one is returned as an empty one
--
-- Returns  {now_us, incarnation, line...}
local much = oversize(KEYS[1])
if much then return too_large(KEYS[1], much) end
local out = { int(now_us), incarnation }
for i, line in ipairs(redis.call('LRANGE', KEYS[1], 0, ARGV[1] - 1)) do
  out[i + 2] = #line <= tonumber(ARGV[2]) and line or ''
end
return out
