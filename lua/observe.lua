-- observe.lua: returns the states of up to 100 jobs. Changes nothing.
--
-- KEYS     state   <ns>:{<job>}:state   hash, see lib.lua
-- ARGV[1]  most    the most bytes of a state; a larger one is not returned
--
-- Returns  {now_us, incarnation, {field, value, ...}...}   an empty array for a job that the store does not know,
--                                                         {'!', reason} for a value that is not a state
--          As many as FLEET_MOST bytes have room for, but at least one: the caller asks for the others again.
local out, all = { int(now_us), incarnation }, 0
for i, key in ipairs(KEYS) do
  local much, bytes = oversize(key, FIELDS_MOST), 0
  local state = much and { '!', 'it has ' .. much } or redis.pcall('HGETALL', key)
  if much then
    -- It is not read.
  elseif state.err then
    if not string.find(state.err, 'WRONGTYPE', 1, true) then return state end
    state = { '!', state.err }
  else
    for _, text in ipairs(state) do bytes = bytes + #text end
    if bytes > tonumber(ARGV[1]) then state, bytes = { '!', 'it has ' .. int(bytes) .. ' bytes' }, 0 end
  end
  all = all + bytes
  if i > 1 and all > FLEET_MOST then break end
  out[i + 2] = state
end
return out
