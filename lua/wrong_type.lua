-- wrong_type.lua: returns those of the keys whose value has another type than soloist gives it. Changes nothing.
--
-- KEYS     any keys of soloist
--
-- Returns  {now_us, incarnation, key...}
local out = { int(now_us), incarnation }
for _, key in ipairs(KEYS) do
  local read = { 'HLEN', key }
  if string.find(key, '}:history$') or string.find(key, '}:decisions$') then read = { 'LRANGE', key, 0, 0 } end
  if string.find(key, ':jobs$') then read = { 'SMEMBERS', key } end
  local value = redis.pcall(unpack(read))
  if type(value) == 'table' and value.err and string.find(value.err, 'WRONGTYPE', 1, true) then
    out[#out + 1] = key
  end
end
return out
