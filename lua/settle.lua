-- settle.lua: records how a run ended and releases its lease. The reference is `settle` in src/logic/claim/settle.rs.
--
-- KEYS[1]  state    <ns>:{<job>}:state     hash, see lib.lua
-- KEYS[2]  history  <ns>:{<job>}:history   list of JSON run records, newest first, expires
-- KEYS[3]  output   <ns>:{<job>}:output:<run>   hash, see pieces.lua
-- ARGV[1]  run      ARGV[2] occurrence (ms)   ARGV[3] outcome   ARGV[4] record (JSON)   ARGV[5] channel
-- ARGV[6]  next_attempt   the trigger of the attempt that follows, or empty
-- ARGV[7]  delay          milliseconds until that attempt
-- ARGV[8]  job      ARGV[9] tail of the output   ARGV[10] bytes of output before the tail
-- ARGV[11] more     bytes of the tail that the holder stores with output.lua, before or after; then ARGV[9] is empty
-- ARGV[12] attempt  ARGV[13] ended   when the run ended (ms), or empty
-- ARGV[14] marks    which bytes of the output came from stderr, or empty
-- ARGV[15] started  when its command was started (ms), or empty
--
-- Publishes the job on the channel `<channel>:changes`, as claim.lua does.
--
-- Returns  {now_us, incarnation, 'done' | 'lost'}   lost: the holder no longer had the lease; the record is kept anyway

local function await_attempt(e)
  e.next_attempt = { at = now + tonumber(ARGV[7]), trigger = ARGV[6] }
  redis.call('PUBLISH', ARGV[5], cjson.encode({ attempt_awaited = { job = ARGV[8], occurrence = e.occurrence } }))
end

-- True: an occurrence newer than that of `e` was granted since `e` was found dead. Its token is higher.
local function granted_since(open, e)
  for _, o in ipairs(open) do if o.occurrence > e.occurrence then return true end end
  return false
end

redis.call('PERSIST', KEYS[1]) -- see renew.lua
local st = redis.call('HMGET', KEYS[1], 'incarnation', 'open', 'last', 'newest', 'waiting')
-- Most often the run that ended last is another one; this search shows it without decoding.
if st[3] and string.find(st[3], ARGV[1], 1, true) then
  local last = cjson.decode(st[3])
  if last.run == ARGV[1] and last.outcome ~= 'unknown' then return { int(now_us), incarnation, 'done' } end
end
local open, i, by = st[2] and cjson.decode(st[2]) or {}, nil, nil
for j, e in ipairs(open) do if e.run == ARGV[1] and not e.next_attempt then i = j end end
if i and ARGV[3] == 'cancelled' then by = open[i].stopped_by elseif i then by = open[i].by end
push_history(KEYS[2], by and string.sub(ARGV[4], 1, -2) .. ',"by":' .. cjson.encode(by) .. '}' or ARGV[4])
local more, output = tonumber(ARGV[11]), load_output(KEYS[3])
if more > 0 then
  local before = tonumber(ARGV[10])
  output = output or { start = before, base = before, stop = before }
  output.total, output.patience = before + more, now + OUTPUT_PATIENCE
  save_output(KEYS[3], output)
elseif ARGV[9] ~= '' then
  local before = tonumber(ARGV[10])
  if output then redis.call('DEL', KEYS[3]) end
  output = { start = before, base = before, stop = before, done = true }
  put_pieces(KEYS[3], output, ARGV[9])
  save_output(KEYS[3], output)
elseif output then
  output.done = true
  save_output(KEYS[3], output)
end
if output and ARGV[14] ~= '' then redis.call('HSET', KEYS[3], 'marks', ARGV[14]) end

local ended = tonumber(ARGV[13]) or now
if not i and st[1] == incarnation then
  -- The instance that found the lease lapsed could not know how the run ended: correct what it said.
  local last = st[3] and cjson.decode(st[3]) or {}
  if last.run == ARGV[1] then
    last.outcome, last.started, last.ended = ARGV[3], tonumber(ARGV[15]), unless_at(last.to, ended)
    redis.call('HSET', KEYS[1], 'last', cjson.encode(last))
    local lapsed = ARGV[6] ~= '' and redis.call('HGET', KEYS[1], 'lapsed')
    local e = lapsed and cjson.decode(lapsed)
    if e and e.run == ARGV[1] and not e.stop and not granted_since(open, e) then
      await_attempt(e)
      open[#open + 1] = e
      redis.call('HDEL', KEYS[1], 'lapsed')
      save_list(KEYS[1], 'open', open)
    end
  end
  publish_changes(ARGV[5], { ARGV[8] })
  return { int(now_us), incarnation, 'lost' }
end

local occurrence = tonumber(ARGV[2])
if not st[1] then redis.call('HSET', KEYS[1], 'incarnation', '', 'since', 0) end
if occurrence > tonumber(st[4] or '0') then redis.call('HSET', KEYS[1], 'newest', int(occurrence)) end
if i then
  local e = open[i]
  -- Use the time of its end: the settlement may come long after it, and occurrences that were due in between did not
  -- overlap with this run.
  save_last(KEYS[1], e, ARGV[3], tonumber(ARGV[15]), math.min(ended, now), ended)
  if ARGV[6] ~= '' and not e.stop then
    await_attempt(e)
  else
    table.remove(open, i)
  end
  save_list(KEYS[1], 'open', open)
else
  -- The state is older than the grant of this attempt: remove the entries of its earlier attempts.
  local left = {}
  for _, e in ipairs(open) do
    if e.occurrence ~= occurrence or e.attempt > tonumber(ARGV[12]) then left[#left + 1] = e end
  end
  if #left < #open then save_list(KEYS[1], 'open', left) end
  -- Remember this one: otherwise a renewal of an earlier attempt that comes late would put that back.
  local attempt, instance = tonumber(ARGV[12]), cjson.decode(ARGV[4]).instance
  local last = st[3] and cjson.decode(st[3])
  local newer = last and (last.occurrence > occurrence or last.occurrence == occurrence and last.attempt > attempt)
  if type(instance) == 'string' and not newer then
    local to, started = math.min(ended, now), tonumber(ARGV[15])
    local unseen = { occurrence = occurrence, attempt = attempt, run = ARGV[1], instance = instance,
      granted_at = started or to }
    save_last(KEYS[1], unseen, ARGV[3], started, to, ended)
  end
end
if st[5] then
  redis.call('HDEL', KEYS[1], 'waiting')
  redis.call('PUBLISH', ARGV[5], cjson.encode({ ended = { job = ARGV[8] } }))
end
publish_changes(ARGV[5], { ARGV[8] })
return { int(now_us), incarnation, 'done' }
