-- compare_and_set.lua: replace the state of a job, if it is still what the caller read. For everything that is not
-- urgent (register, pause, skip, cancel, trigger): decided in Rust by src/logic/claim/ on the state that was read.
--
-- KEYS[1]  state    <ns>:{<job>}:state     hash, see lib.lua
-- KEYS[2]  history  <ns>:{<job>}:history   list of JSON run records, newest first, expires
-- KEYS[3]  epoch    <ns>:epoch            hash, see heartbeat.lua
-- KEYS[4]  jobs     <ns>:jobs             set of the names of all jobs that were ever adopted
-- ARGV[1]  incarnation   the one in which it was read
-- ARGV[2]  channel
-- ARGV[3]  epoch         the id of the epoch in which it is to be written, or empty: any
-- ARGV[4]  job           kept in `jobs` when its state is adopted
-- ARGV[5]  number of fields and values that were read, then these; then the same of the fields to set; then the
--          number of fields to remove, and these; then the number of records, and these; the same of events
--
-- Returns  {now_us, incarnation, 1}  done    {now_us, incarnation, 0}  it has changed meanwhile: read and decide again
local p = 5
local function take()
  local list, n = {}, tonumber(ARGV[p])
  for i = 1, n do list[i] = ARGV[p + i] end
  p = p + n + 1
  return list
end
local conflict = { int(now_us), incarnation, 0 }
local was, set, remove, records, events = take(), take(), take(), take(), take()
if ARGV[3] ~= '' and redis.call('HGET', KEYS[3], 'id') ~= ARGV[3] then return conflict end
if incarnation ~= ARGV[1] or redis.call('HLEN', KEYS[1]) * 2 ~= #was then return conflict end
for i = 1, #was, 2 do
  if redis.call('HGET', KEYS[1], was[i]) ~= was[i + 1] then return conflict end
end
if #set > 0 then redis.call('HSET', KEYS[1], unpack(set)) end
for i = 1, #set, 2 do if set[i] == 'incarnation' then redis.call('SADD', KEYS[4], ARGV[4]) end end
if #remove > 0 then redis.call('HDEL', KEYS[1], unpack(remove)) end
for _, record in ipairs(records) do push_history(KEYS[2], record) end
for _, event in ipairs(events) do redis.call('PUBLISH', ARGV[2], event) end
return { int(now_us), incarnation, 1 }
