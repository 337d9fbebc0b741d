-- observe.lua: returns the states of up to 100 jobs. Changes nothing.
--
-- KEYS   state   <ns>:{<job>}:state   hash, see lib.lua
--
-- Returns  {now_us, incarnation, {field, value, ...}...}   an empty array for a job that the store does not know,
--                                                         {'!', reason} for a value that is not a state
local out = { int(now_us), incarnation }
for i, key in ipairs(KEYS) do
  local state, bytes = redis.pcall('HGETALL', key), 0
  if state.err then
    if not string.find(state.err, 'WRONGTYPE', 1, true) then return state end
    state = { '!', state.err }
  end
  for _, text in ipairs(state) do bytes = bytes + #text end
  if bytes > STATE_MOST then state = { '!', 'it has ' .. int(bytes) .. ' bytes' } end
  out[i + 2] = state
end
return out
