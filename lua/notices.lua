-- notices.lua: returns what the fleet has noted for notifications. Changes nothing.
--
-- KEYS[1]  notices  <ns>:notices   hash: `lease` (see src/logic/notify/stand.rs), and notes by their names
-- ARGV[1]  cursor   empty: the lease, and the note given_up if there is one; 0: the lease and the first part of all
--                   notes; the cursor of an answer: the next part (complete only if nobody writes meanwhile)
--
-- Returns  {now_us, incarnation, lease or empty, {name, note, ...}, cursor, 0 after the last part}
local lease, notes, cursor = redis.call('HGET', KEYS[1], 'lease') or '', {}, ARGV[1]
if cursor == '' then
  local note = redis.call('HGET', KEYS[1], 'given_up')
  if note and #note > LINE_MOST then return too_large(KEYS[1], #note .. ' bytes in its field given_up') end
  if note then notes = { 'given_up', note } end
else
  local much = cursor == '0' and oversize(KEYS[1], NOTES_MOST, NOTES_BYTES_MOST)
  if much then return too_large(KEYS[1], much) end
  local bytes = 0
  repeat
    local part = redis.pcall('HSCAN', KEYS[1], cursor, 'COUNT', 200)
    -- Users of earlier versions may lack the right to it.
    if part.err then part = { '0', redis.call('HGETALL', KEYS[1]) } end
    cursor = part[1]
    for _, text in ipairs(part[2]) do
      bytes = bytes + #text
      notes[#notes + 1] = text
    end
  until cursor == '0' or bytes > NOTES_AT_ONCE
  if bytes > FLEET_MOST then return too_large(KEYS[1], int(bytes) .. ' bytes') end
end
if #lease > NAME_MOST then return too_large(KEYS[1], #lease .. ' bytes in its field lease') end
return { int(now_us), incarnation, lease, notes, cursor }
