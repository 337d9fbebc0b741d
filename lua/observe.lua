-- observe.lua: the states of up to 100 jobs as they are. Changes nothing.
--
-- KEYS     state   <ns>:{<job>}:state   hash, see lib.lua
--
-- Returns  {now_us, inc, {field, value, ...}...}   an empty array for a job the store does not know
local out = { int(now_us), inc }
for i, key in ipairs(KEYS) do out[i + 2] = redis.call('HGETALL', key) end
return out
