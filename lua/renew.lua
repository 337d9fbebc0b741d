-- renew.lua: renews the lease of exactly one run, or puts it back into a store that lost it. The reference is `renew`
-- in src/logic/claim/renew.rs.
--
-- KEYS[1]  state    <ns>:{<job>}:state   hash, see lib.lua
-- ARGV[1]  run      ARGV[2] occurrence (ms)   ARGV[3] attempt   ARGV[4] seq: counts this run's renewals
-- ARGV[5]  entry    JSON members of the open entry: all but seq, incarnation, renewed_at; empty: the holder did not
--                   trust its lease any more when it asked, so that it is not put back
-- ARGV[6]  reclaim  the incarnation that answered `unknown` before, and may have the lease back; or empty
--
-- Returns  {now_us, incarnation, 'renewed', stop}  stop: empty, cancelled or replaced
--          {now_us, incarnation, 'lost'}           another run has the lease, or this run was ended
--          {now_us, incarnation, 'unknown'}        the data lacks the run: it is put back if the holder asks again

-- A full server refuses a script whose first write may need memory. This script must get through, because an active run
-- must be able to renew its lease. So the first write is PERSIST, which changes nothing and is never refused.
redis.call('PERSIST', KEYS[1])
local st = redis.call('HMGET', KEYS[1], 'incarnation', 'open', 'newest', 'last')
local open = st[2] and cjson.decode(st[2]) or {}
local seq = tonumber(ARGV[4])
for _, e in ipairs(open) do
  if e.run == ARGV[1] and not e.next_attempt then
    e.seq = math.min(math.max(e.seq + 1, seq), SEQ_MOST)
    e.renewed_at = now
    e.incarnation = incarnation
    save_list(KEYS[1], 'open', open)
    return { int(now_us), incarnation, 'renewed', e.stop or '' }
  end
end
if st[1] == incarnation then return { int(now_us), incarnation, 'lost' } end
local occurrence, attempt = tonumber(ARGV[2]), tonumber(ARGV[3])
local last = st[4] and cjson.decode(st[4]) or {}
-- It was ended, or a later attempt was, which was granted after this one had ended.
if last.run == ARGV[1] and last.outcome ~= 'unknown' or last.occurrence == occurrence and last.attempt > attempt then
  return { int(now_us), incarnation, 'lost' }
end

-- The state is gone or from another incarnation: put the lease back, unless it is too late, or the data knows that this
-- occurrence was granted and does not have the run, which was found dead then.
local left, known = {}, false
for _, e in ipairs(open) do
  if e.occurrence == occurrence then
    if e.attempt > attempt then return { int(now_us), incarnation, 'lost' } end
    known = true
  else
    left[#left + 1] = cjson.encode(e)
  end
end
local decided = (st[1] or '') ~= '' and tonumber(st[3] or '0') >= occurrence
if ARGV[5] == '' or decided and not known then return { int(now_us), incarnation, 'lost' } end
-- It may have been on its way since before the loss; meanwhile a later attempt may have come and gone with the data.
if ARGV[6] ~= incarnation then return { int(now_us), incarnation, 'unknown' } end
left[#left + 1] = '{' .. ARGV[5] .. ',"seq":' .. ARGV[4] .. ',"incarnation":"' .. incarnation .. '","renewed_at":'
  .. int(now) .. '}'
local key = cjson.decode('{' .. ARGV[5] .. '}').key
if key then
  -- Remember the key: otherwise the trigger would run once more when this run has ended.
  local known = false
  for _, t in ipairs(cjson.decode(redis.call('HGET', KEYS[1], 'triggered') or '[]')) do
    known = known or t.key == key
  end
  if not known then
    local pending = {}
    for _, p in ipairs(cjson.decode(redis.call('HGET', KEYS[1], 'triggers') or '[]')) do
      if p.key ~= key then pending[#pending + 1] = p end
    end
    save_list(KEYS[1], 'triggers', pending)
    remember_key(KEYS[1], key, occurrence)
  end
end
redis.call('HSET', KEYS[1], 'open', '[' .. table.concat(left, ',') .. ']',
  'newest', int(math.max(occurrence, tonumber(st[3] or '0'))))
if not st[1] then redis.call('HSET', KEYS[1], 'incarnation', '', 'since', 0) end
return { int(now_us), incarnation, 'renewed', '' }
