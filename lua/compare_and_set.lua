-- compare_and_set.lua: replaces the state of a job if it is still the state that the caller read. For requests that are
-- not urgent (register, pause, skip, cancel, trigger): src/logic/claim/ decides them in Rust on the state that it read.
--
-- KEYS[1]  state    <ns>:{<job>}:state     hash, see lib.lua
-- KEYS[2]  history  <ns>:{<job>}:history   list of JSON run records, newest first, expires
-- KEYS[3]  epoch    <ns>:epoch            hash, see heartbeat.lua
-- KEYS[4]  jobs     <ns>:jobs             set of the names of all jobs that were ever adopted
-- ARGV[1]  incarnation   the incarnation in which the caller read the state
-- ARGV[2]  channel       for events
-- ARGV[3]  epoch         the id of the epoch in which to write, or empty: any
-- ARGV[4]  job           added to `jobs` when its state is adopted
-- ARGV[5]  then five lists, each after the number of its items: the fields and values that the caller read, the fields
--          and values to set, the fields to remove, the records, the events
--
-- Publishes the job on the channel `<channel>:changes`, as claim.lua does.
--
-- Returns  {now_us, incarnation, 1}  written
--          {now_us, incarnation, 0}  the state has changed meanwhile: the caller reads it and decides again
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
publish_changes(ARGV[2], { ARGV[4] })
return { int(now_us), incarnation, 1 }
