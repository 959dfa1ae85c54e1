(** * Windows of pixels (core/geometry.py)

    A window is a rectangle of pixels; a mask is a union of windows, and so are several patches. *)

From Coq Require Import List Bool Arith Lia.
From PatchCleanser Require Import Images.
Import ListNotations.

Definition pixel : Type := nat * nat. (* row, column *)

Record window := Window { top : nat; left : nat; height : nat; width : nat }.

Definition shape : Type := nat * nat. (* height, width *)

Definition in_window (w : window) (p : pixel) : bool :=
  (top w <=? fst p) && (fst p <? top w + height w) && (left w <=? snd p) && (snd p <? left w + width w).

(** The pixels of a mask, or of several patches. *)
Definition region_of (windows : list window) : region pixel := fun p => existsb (fun w => in_window w p) windows.

Definition inside (inner outer : window) : Prop :=
  top outer <= top inner /\ top inner + height inner <= top outer + height outer /\
  left outer <= left inner /\ left inner + width inner <= left outer + width outer.

Lemma in_window_iff : forall w p,
  in_window w p = true <->
  top w <= fst p < top w + height w /\ left w <= snd p < left w + width w.
Proof.
  intros. unfold in_window. rewrite !andb_true_iff, !Nat.leb_le, !Nat.ltb_lt. lia.
Qed.

Lemma region_of_iff : forall windows p,
  region_of windows p = true <-> exists w, In w windows /\ in_window w p = true.
Proof. intros. unfold region_of. apply existsb_exists. Qed.

Lemma a_window_hides_what_is_inside : forall inner outer, inside inner outer ->
  hides (region_of [outer]) (region_of [inner]).
Proof.
  intros inner outer H p Hp. apply region_of_iff in Hp. destruct Hp as [w [[<-|[]] Hp]].
  apply region_of_iff. exists outer. split; [now left|]. apply in_window_iff in Hp. apply in_window_iff.
  unfold inside in H. lia.
Qed.

Lemma hiding_is_transitive : forall {pixel} (a b c : region pixel), hides a b -> hides b c -> hides a c.
Proof. unfold hides. auto. Qed.

(** ** Patches of a shape within a room *)

Definition placed (s : shape) (room w : window) : Prop :=
  height w = fst s /\ width w = snd s /\ inside w room.

Definition smaller (s big : shape) : Prop := fst s <= fst big /\ snd s <= snd big.

(** A patch inside a covered patch is covered, so only the largest shapes need checking. *)
Lemma a_smaller_patch_lies_inside_a_larger_one : forall s big room w,
  smaller s big -> fst big <= height room -> snd big <= width room -> placed s room w ->
  exists v, placed big room v /\ inside w v.
Proof.
  intros s big room w [Hh Hw] Hroom Hroom' [E [E' [H1 [H2 [H3 H4]]]]].
  exists (Window (Nat.min (top w) (top room + height room - fst big))
                 (Nat.min (left w) (left room + width room - snd big)) (fst big) (snd big)).
  unfold placed, inside; simpl. rewrite E, E' in *. lia.
Qed.

(** ** Masks as the program stores them *)

(** Leaving out a window that lies inside another one changes no pixel. *)
Definition contains (outer inner : window) : bool :=
  (top outer <=? top inner) && (left outer <=? left inner) &&
  (top inner + height inner <=? top outer + height outer) && (left inner + width inner <=? left outer + width outer).

Lemma contains_iff : forall outer inner, contains outer inner = true <-> inside inner outer.
Proof. intros. unfold contains, inside. rewrite !andb_true_iff, !Nat.leb_le. lia. Qed.

Fixpoint canonical (windows : list window) : list window :=
  match windows with
  | [] => []
  | w :: rest =>
    let others := canonical rest in
    if existsb (fun o => contains o w) others then others
    else w :: filter (fun o => negb (contains w o)) others
  end.

Theorem canonical_masks_hide_the_same : forall windows p, region_of (canonical windows) p = region_of windows p.
Proof.
  intros windows p. induction windows as [|w rest IH]; [reflexivity|].
  cbn [canonical]. change (region_of (w :: rest) p) with (in_window w p || region_of rest p). rewrite <- IH.
  destruct (existsb _ _) eqn:E; apply eq_true_iff_eq; rewrite orb_true_iff, !region_of_iff.
  - split; [tauto|]. intros [H|H]; [|assumption].
    apply existsb_exists in E. destruct E as [o [Ho E]]. exists o. split; [assumption|].
    apply contains_iff in E. apply in_window_iff in H. apply in_window_iff. unfold inside in E. lia.
  - split.
    + intros [o [[<-|Ho] Hp]]; [now left|]. apply filter_In in Ho. right. exists o. tauto.
    + intros [H|[o [Ho Hp]]]; [exists w; split; [now left|assumption]|].
      destruct (contains w o) eqn:C.
      * exists w. split; [now left|]. apply contains_iff in C. apply in_window_iff in Hp. apply in_window_iff.
        unfold inside in C. lia.
      * exists o. split; [right; apply filter_In; now rewrite C | assumption].
Qed.
