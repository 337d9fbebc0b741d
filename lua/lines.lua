-- lines.lua: returns the newest lines of a job's history or decisions. Changes nothing.
--
-- KEYS[1]  list    <ns>:{<job>}:history or <ns>:{<job>}:decisions
-- ARGV[1]  lines   the most lines to return
--
-- Returns  {now_us, incarnation, line...}
local out = { int(now_us), incarnation }
for i, line in ipairs(redis.call('LRANGE', KEYS[1], 0, ARGV[1] - 1)) do out[i + 2] = line end
return out
