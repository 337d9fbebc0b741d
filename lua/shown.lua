-- shown.lua: the end of a script whose answer shows how its questions were decided, for `--record`. The script's own
-- file stands before it as the function `body`.
--
-- KEYS   those that end in `:state` are states of jobs, see lib.lua
--
-- Returns  what `body` returns, with one item more: {time, {before, after}...} with the time by which it decided (us),
--          and for each state {field, value, ...} before and after
local states = {}
for _, key in ipairs(KEYS) do
  if string.sub(key, -6) == ':state' then states[#states + 1] = { key, redis.call('HGETALL', key) } end
end
local out = body()
if out.err then return out end
local shown = { int(in_doubt and believed * 1000 or now_us) }
for _, state in ipairs(states) do shown[#shown + 1] = { state[2], redis.call('HGETALL', state[1]) } end
out[#out + 1] = shown
return out
